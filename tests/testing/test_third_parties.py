"""Formats that are made of others, have several numbers for a block, or two levels of scales, pass the kit as any other
does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpq import registry
from lpq.testing.conformance import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import double_format
import residual_format
import value_formats

OTHERS = (double_format, residual_format, value_formats)
for others in OTHERS:  # the tests are collected now
    others.register()
lpq_formats = ["residual(base=nvfp4, rest=mxfp8)", "values_codebook", "values_eight", "double"]


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    for others in OTHERS:
        others.register()
    yield
    registry.refresh()
