"""The conformance kit of lpq on MS-EDEN."""

from __future__ import annotations

from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ["eden"]
