"""The conformance kit of lpq on the mean split."""

from __future__ import annotations

from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ["mean_split(rest=nvfp4)"]
