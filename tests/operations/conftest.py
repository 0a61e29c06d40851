"""Lets the tests of this folder import the list of quantizers, and what starts several processes."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("operations", "formats", "distributed")]
