"""Formats that have several numbers for a block, or two levels of scales, pass the kit as any other does. So does one
that is made of others: it is in the guide to plugins, on whose formats ``tests/docs/test_snippets.py`` runs the kit."""

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

OTHERS = (double_format, value_formats)
for others in OTHERS:  # the tests are collected now
    others.register()
lpq_formats = ["values_codebook", "values_eight", "double"]


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    for others in OTHERS:
        others.register()
    yield
    registry.refresh()
