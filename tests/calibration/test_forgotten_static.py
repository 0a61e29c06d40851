"""A format without the option ``static`` cannot be calibrated, and is named with the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lpq
from lpq import registry
from lpq.calibration import CalibrationError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
import broken_formats as broken

FORGOT = (
    r"format broken measures 'amax' of the whole tensor at each step, since its quantizer has no option static: bool"
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry.register(broken.Plugin(broken.SharesOneScale), name="broken")
    yield
    registry.refresh()


def model(*recipes: str) -> torch.nn.Module:
    return torch.nn.Sequential(*(lpq.convert(torch.nn.Linear(32, 32), recipe) for recipe in recipes))


def test_a_format_that_forgot_it_is_told() -> None:
    batches = [torch.randn(4, 32)]
    with pytest.raises(CalibrationError, match=f"no layer has a scale that can become static: {FORGOT}"):
        lpq.calibrate(model("broken()"), batches)
    with pytest.warns(UserWarning, match=FORGOT):
        lpq.calibrate(model("broken()", "fp8-current"), batches)


def test_no_other_is() -> None:
    """Neither one that has the option, nor one whose scales are of rows or blocks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpq.calibrate(model("fp8-current", "fp8-row", "mxfp8"), [torch.randn(4, 32)])
