"""The names of ``lpq`` as type checkers show them to a user. ``make types`` checks this file by mypy and by pyright:
each ``type: ignore`` is an error that both must find, since an ignore that ignores nothing is an error itself."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import Tensor, nn

import lpq


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def rows(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x).relu()
        return y


def test_a_model_keeps_its_class() -> None:
    model = assert_type(lpq.convert(Model(), "mxfp8"), Model)
    assert assert_type(model.rows(torch.ones(16, 32)), Tensor).shape == (16, 32)
    assert assert_type(lpq.unfuse(lpq.fuse(model)), Model) is model
    with lpq.hold_weights(model) as held:
        assert assert_type(held, Model) is model


def test_names_have_types() -> None:
    quantizer = assert_type(lpq.quantizer("mxfp8", dtype="e5m2"), lpq.Quantizer)
    assert isinstance(quantizer, lpq.core.Quantizer)
    assert isinstance(quantizer.quantize(torch.ones(16, 32)), lpq.QuantizedTensor)
    assert_type(lpq.report(lpq.convert(Model(), "mxfp8")), lpq.nn.Report)
    assert_type(lpq.recipe("mxfp8"), lpq.Recipe)
    assert_type(lpq.__version__, str)


def test_other_names_are_errors() -> None:
    with pytest.raises(AttributeError):
        lpq.qantizer("mxfp8")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = lpq.nn.Lineer  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        lpq.convert(Model(), "mxfp8", step=3)  # type: ignore[call-arg]
