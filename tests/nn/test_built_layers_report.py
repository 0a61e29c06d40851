"""The report of a model that was built of lpq's layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpq
from lpq.nn import GroupedLinear


def built() -> nn.Sequential:
    return nn.Sequential(lpq.nn.Linear(64, 64, recipe="mxfp8"), nn.GELU(), nn.Linear(64, 64))


def test_layers_that_were_built_with_a_recipe_are_reported() -> None:
    model = built()
    report = lpq.report(model)
    assert [(one.name, one.kind, one.note) for one in report.converted] == [("0", "Linear", "mxfp8")]
    assert "50 % of the matrix parameters are converted" in str(report)
    assert "not converted: 2 (Linear)" in str(report)
    model[0].recipe = "nvfp4"
    assert [one.note for one in lpq.report(model).converted] == ["nvfp4"]
    assert str(lpq.report(model[0])).endswith("converted  (the model) (Linear): nvfp4")
    assert "experts  (the model): fprop, dgrad, wgrad in bf16" in str(
        lpq.report(GroupedLinear(2, 64, 64, recipe="mxfp8"))
    )


def test_beside_converted_ones_each_is_reported_once() -> None:
    model = nn.ModuleDict({"converted": lpq.convert(nn.Sequential(nn.Linear(64, 64)), "nvfp4"), "built": built()})
    assert {one.name: one.note for one in lpq.report(model).converted} == {"converted.0": "nvfp4", "built.0": "mxfp8"}
    model["again"] = model["built"]
    assert len(lpq.report(model).converted) == 2
    lpq.convert(model, "mxfp8")
    assert [one.name for one in lpq.report(model).converted] == ["converted.0", "built.0", "built.2"]


def test_a_layer_that_no_pass_called_is_named() -> None:
    model = nn.ModuleList([built(), lpq.nn.Linear(64, 64, recipe="mxfp8")])
    model[0](torch.randn(32, 64)).sum().backward()
    assert lpq.report(model).uncalled == ("1",)


def test_a_model_without_a_recipe_is_refused() -> None:
    for model in (nn.Sequential(nn.Linear(64, 64)), lpq.nn.Linear(64, 64, recipe=None)):
        with pytest.raises(ValueError, match=r"the model was not converted: call lpq\.convert"):
            lpq.report(model)
    with pytest.raises(ValueError, match="the model was not converted"):
        lpq.set_step(built(), 1)
