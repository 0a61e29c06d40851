"""The conformance kit of lpq on hot channels."""

from __future__ import annotations

from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ['hot_channels(rest=nvfp4, channels="3 17 40")']
