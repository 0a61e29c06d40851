"""Lets the tests of this folder start ranks as those of training do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("train", "distributed")]
