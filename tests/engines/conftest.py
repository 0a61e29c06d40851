"""Lets the tests of this folder import what they share, and the helpers for several processes."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Progress bars are no part of what is tested."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
