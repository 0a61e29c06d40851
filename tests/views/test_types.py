"""The names of ``lpq`` as a type checker shows them to a user. ``make types`` checks this file: each ``type: ignore``
is an error that mypy must find, since an ignore that ignores nothing is an error itself."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_says_the_same() -> None:
    done = subprocess.run(["pyright", "--pythonpath", sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
