"""Formats that have several numbers for a block, two levels of scales or a zero point pass the kit as any other does.
So does one that is made of others: it is in the guide to plugins, on whose formats ``tests/docs/test_snippets.py`` runs
the kit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpq import registry
from lpq.testing.conformance import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import double_format
import value_formats
import zero_points

OTHERS = (double_format, value_formats, zero_points)
for others in OTHERS:  # the tests are collected now
    others.register()
lpq_formats = ["values_codebook", "values_eight", "double", "zero"]


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    for others in OTHERS:
        others.register()
    yield
    registry.refresh()
