"""Lets the tests of this folder import what they share, and the list of quantizers."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "formats")]

from example import installed, int4  # noqa: E402  (from where it was just added)

__all__ = ["installed", "int4"]
