"""Lets the tests of this folder import what they share, and what those of the CPU do."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "formats"), str(HERE.parent / "distributed")]
