"""Lets the tests of this folder import what they share, and imitates launches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import imitated  # noqa: E402  (from where it was just added)


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of the kernels whose launches are imitated during the test."""
    with imitated.launches() as names:
        yield names
