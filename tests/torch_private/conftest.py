"""Lets the tests of this folder import the helpers for several processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "distributed")]
