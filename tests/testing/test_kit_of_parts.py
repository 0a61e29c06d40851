"""A format that is made of others passes the conformance kit as any other does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpq import registry
from lpq.testing.conformance import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import residual_format

residual_format.register()
lpq_formats = [
    "residual(base=nvfp4, rest=mxfp8)",
]


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    residual_format.register()
    yield
    registry.refresh()
