"""A weight that ``convert(…, weights=…)`` prepares keeps what others set on it where torch keeps it, or is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import converted, linears
from test_own_attributes import content
from torch import nn
from torch.nn.utils import prune

import lpq
from lpq.distributed.shard import prepared_parameter
from lpq.tensor import QuantizedTensor
from lpq.tensor.rebuilt import DamagedTensor

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
WEIGHTS = pytest.mark.parametrize("weights", ["high_precision", "quantized"])
MOVES: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "and back": lambda model: model.half().float(),
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "apply": lambda model: model._apply(torch.clone),
}


def saved_and_loaded(value: Any) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)), "torch.save": saved_and_loaded, "copy": copy.copy,
}  # fmt: skip


@WEIGHTS
def test_what_others_set_on_a_weight_stays(weights: Any) -> None:
    """Such as Megatron's and Hugging Face's marks: also where the weight is cast later."""
    model = linears(64, 64, 64)
    model[0].weight.allreduce, model[0].weight.grad = False, torch.ones(64, 64)  # type: ignore[attr-defined]
    lpq.convert(model, "mxfp8", weights=weights)
    weight: Any = model[0].weight
    assert torch.equal(weight.grad, torch.ones(64, 64))
    assert not hasattr(model[1].weight, "allreduce")
    model.to(torch.bfloat16)(X.bfloat16()).sum().backward()
    assert model[0].weight.allreduce is False


class Marked(nn.Parameter):
    """A parameter whose class declares what is set on it."""

    mark: bool = False


@WEIGHTS
def test_what_the_class_of_a_weight_declares_stays(weights: Any) -> None:
    """The class is lost, as by fully_shard."""
    model = linears(64, 64)
    weight: Any = Marked(model[0].weight.detach())
    weight.mark, model[0].weight = True, weight
    assert lpq.convert(model, "mxfp8", weights=weights)[0].weight.mark is True  # type: ignore[union-attr]


@WEIGHTS
@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_a_weight_keep_what_torch_keeps(copied: str, weights: Any) -> None:
    for weight in (linears(64, 64)[0].weight, converted("mxfp8", 64, 64, weights=weights)[0].weight):
        weight.tensor_model_parallel = True
        made = COPIES[copied](weight)
        assert isinstance(made, nn.Parameter)
        assert made.tensor_model_parallel is True
        assert not hasattr(copy.deepcopy(weight), "tensor_model_parallel"), "nor does torch"
        assert not hasattr(COPIES[copied](weight.detach()), "tensor_model_parallel")


@WEIGHTS
def test_a_file_sets_nothing_of_lpq_on_a_weight(weights: Any) -> None:
    """Kernels rely on it."""
    weight = converted("mxfp8", 64, 64, weights=weights)[0].weight
    weight.mark = True
    build, saved = weight.__reduce_ex__(2)
    assert saved[-1] == {"mark": True}
    names = {*vars(weight), *dir(weight)} - {"mark"}
    made = build(*saved[:-1], dict.fromkeys(names, "theirs") | {"mark": True})
    assert "theirs" not in vars(made).values()
    assert made.mark is True
    with pytest.raises(DamagedTensor, match=r"its attributes are 3\. Do not trust the file"):
        build(*saved[:-1], 3)


def test_a_file_of_an_earlier_version_has_no_attributes() -> None:
    assert isinstance(prepared_parameter(torch.ones(2, 2), True), nn.Parameter)


@WEIGHTS
@pytest.mark.parametrize("moved", MOVES)
def test_hooks_of_a_prepared_weight_stay(moved: str, weights: Any) -> None:
    """As hooks of any other weight do: autograd did not call them once the model was cast."""
    model, seen = converted("mxfp8", 64, 64, 64, weights=weights), []
    handles = [
        model[1].weight.register_hook(lambda _: seen.append("tensor")),
        model[1].weight.register_post_accumulate_grad_hook(lambda _: seen.append("post")),
    ]
    MOVES[moved](model)
    model(X.to(model[0].weight.dtype)).sum().backward()
    assert seen == ["tensor", "post"]
    for handle in handles:
        handle.remove()
    model(X.to(model[0].weight.dtype)).sum().backward()
    assert len(seen) == 2


@WEIGHTS
def test_nothing_keeps_a_view_of_a_weight_on_which_an_operator_ran(weights: Any) -> None:
    """Until Python collected garbage, a cycle of references kept it, and the weight could not be moved."""
    model = converted("mxfp8", 64, 64, weights=weights)
    gc.disable()
    try:
        model[0].weight.t().abs()
        torch.nn.utils.parametrizations.spectral_norm(copy.deepcopy(model)[0])
        model.to(torch.bfloat16)
    finally:
        gc.enable()
    assert model[0].weight.dtype == torch.bfloat16


@WEIGHTS
def test_hooks_of_a_weight_that_is_replaced_are_refused(weights: Any) -> None:
    """As of an optimizer that steps in backward, which would train nothing."""
    model = linears(64, 64, 64)
    handle = model[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    before = content(model)
    with pytest.raises(ValueError, match=r"^1: weights= replaces its weight, and loses hooks: add them after fully_s"):
        lpq.convert(model, "mxfp8", weights=weights)
    assert content(model) == before
    lpq.convert(model, "mxfp8")
    handle.remove()
    lpq.convert(model, "mxfp8", weights=weights)


@WEIGHTS
def test_names_of_lpq_on_a_weight_are_refused(weights: Any) -> None:
    """They were lost without a word."""
    model = linears(64, 64, 64)
    model[1].weight.title, model[1].weight.layer = "mine", 3  # type: ignore[attr-defined]
    before = content(model)
    with pytest.raises(ValueError, match=r"^1: weights= replaces its weight, and loses layer, title: rename yours"):
        lpq.convert(model, "mxfp8", weights=weights)
    assert content(model) == before
    assert lpq.convert(model, "mxfp8")[1].weight.title == "mine"  # type: ignore[union-attr]


@WEIGHTS
@pytest.mark.parametrize("stays", ["tied", "pruned"])
def test_a_weight_that_stays_keeps_its_hooks(stays: str, weights: Any) -> None:
    model, seen = linears(64, 64, 64), []
    if stays == "tied":
        model[1].weight = model[0].weight
    else:
        prune.identity(model[0], "weight")
    model[0].weight.register_hook(seen.append)
    model[0].weight.title = "mine"  # type: ignore[attr-defined]
    was = [*model[0].parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lpq.convert.* stored no weight quantized")
        lpq.convert(model, "mxfp8", weights=weights)
    assert all(now is before for now, before in zip(model[0].parameters(), was, strict=True))
    if stays == "tied":
        model(X).sum().backward()
        assert len(seen) == 1


def test_a_weight_that_stays_may_have_recipes_that_none_is_stored_in() -> None:
    rules = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 8}, {"match": "*", "recipe": "nvfp4"}]}
    model = linears(64, 64, 64, 64)
    model[1].weight = model[0].weight
    with pytest.raises(lpq.recipes.RecipeError, match=r"^2: its weight would be stored quantized, and the policy chan"):
        lpq.convert(model, rules, weights="quantized")
    with pytest.warns(UserWarning, match="stored no weight quantized: 0"):
        lpq.convert(model[:2], rules, weights="quantized")


def test_a_prepared_weight_stays_where_it_is_prepared_alike_again() -> None:
    """So do its hooks, and an optimizer that has it."""
    model = converted("mxfp8", 64, 64, weights="high_precision")
    was = model[0].weight
    was.register_hook(lambda _: None)
    assert lpq.convert(model, "nvfp4", weights="high_precision")[0].weight is was
    with pytest.raises(ValueError, match="loses hooks"):
        lpq.convert(model, "nvfp4", weights="quantized")


def test_a_weight_of_another_subclass_is_stored() -> None:
    """torch marks it as a parameter by an attribute, which is nobody's."""

    class Named(torch.Tensor):
        """A tensor of somebody's class."""

    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(torch.randn(64, 64).as_subclass(Named))
    model = lpq.convert(nn.Sequential(layer), "mxfp8", weights="quantized")
    assert isinstance(model[0].weight, QuantizedTensor)


@WEIGHTS
def test_weights_that_are_prepared_under_inference_mode_are_trained(weights: Any) -> None:
    net, other = linears(64, 32), converted("mxfp8", 64, 32, weights=weights)
    with torch.inference_mode():
        lpq.convert(net, "mxfp8", weights=weights)
    for model in (net, other):
        model(X).square().sum().backward()
    assert torch.equal(net[0].weight.grad, other[0].weight.grad)
    assert not any(parameter.is_inference() for parameter in net.parameters())


@WEIGHTS
def test_weights_that_inference_mode_made_are_viewed_and_written_there(weights: Any) -> None:
    with torch.inference_mode():
        net = linears(64, 64)
    lpq.convert(net, "mxfp8", weights=weights)
    before = net(X)
    with torch.inference_mode():
        net[0].weight[:32].zero_()
    after = net(X)
    assert torch.equal(after[..., :32], net[0].bias[:32].expand_as(after[..., :32]))
    assert torch.equal(after[..., 32:], before[..., 32:])
    assert not torch.equal(after, before)
