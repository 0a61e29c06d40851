"""Lets the tests of this folder import what they share, and what starts several processes."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]

from pool import IMPORTED  # noqa: E402  (from where it was just added)

# A second of each rank that needs them. Where they are not installed nothing comes of it.
IMPORTED += [*(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral")), "transformers.trainer"]
