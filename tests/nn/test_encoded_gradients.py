"""A gradient that arrives encoded would be encoded again: layers refuse it, unless they take it as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpq

ROWS = "x=fp8(scaling=row), w=fp8(scaling=row), dy=hybrid(row=mxfp8, col=mxfp8, col_source=row)"


class Watched(TorchDispatchMode):
    """A mode, for which a step goes through the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def backward(y: Tensor, quantizer: Any) -> None:
    if quantizer is not None:
        y.register_hook(quantizer.quantize)
    draw = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=draw).to(y))


@pytest.mark.parametrize("recipe", ["fp8-row", "nvfp4()", "bf16"])
@pytest.mark.parametrize("trains", ["weight", "bias"])
def test_a_layer_refuses_it_by_name(recipe: str, trains: str) -> None:
    """The gradient of the weight would be 4 % off in fp8-row, and 15 % in nvfp4."""
    torch.manual_seed(0)
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 96)), recipe)
    net[0].weight.requires_grad_(trains == "weight")
    net[0].bias.requires_grad_(trains == "bias")
    words = r"layer 0, lpq.nn.Linear\(64, 96\): the gradient of its output, \[32, 96\], arrived encoded as .*dequantize"
    for mode in (torch.enable_grad(), Watched()):
        with mode, pytest.raises(TypeError, match=words):
            backward(net(torch.randn(32, 64)), lpq.quantizer("mxfp8"))
        assert net[0].weight.grad is None
        assert net[0].bias.grad is None
    backward(net(torch.randn(32, 64)), None)
    assert getattr(net[0], trains).grad is not None


def test_a_grouped_layer_takes_that_of_its_recipe_alone() -> None:
    torch.manual_seed(0)
    layer = lpq.nn.GroupedLinear(2, 64, 96, bias=False, recipe=ROWS)
    x = torch.randn(32, 64)
    backward(layer(x, [20, 12]), None)
    expected = layer.weight.grad
    layer.weight.grad = None
    assert layer.recipe is not None
    backward(layer(x, [20, 12]), layer.recipe.dy)
    assert expected is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)
    with pytest.raises(TypeError, match=r"GroupedLinear\(2, 64, 96\): the gradient of its output, .* as mxfp8"):
        backward(layer(x, [20, 12]), lpq.quantizer("mxfp8"))
    with_bias = lpq.nn.GroupedLinear(2, 64, 96, recipe=ROWS)  # whose gradient is a sum in high precision
    with pytest.raises(TypeError, match=r"GroupedLinear\(2, 64, 96\): the gradient of its output"):
        backward(with_bias(x, [20, 12]), layer.recipe.dy)


class Encoded(torch.autograd.Function):
    """Returns its gradient encoded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return lpq.quantizer("mxfp8").quantize(dy)


@pytest.mark.parametrize("has_one", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_no_leaf_gets_it(has_one: bool, differentiated: bool) -> None:
    leaf = torch.randn(32, 64, requires_grad=True)
    leaf.grad = torch.ones(32, 64) if has_one else None
    with pytest.raises(
        TypeError, match=r"of \[32, 64\] arrived encoded as mxfp8 where autograd keeps it as the \.grad"
    ):
        Encoded.apply(leaf).sum().backward(create_graph=differentiated)
    assert (leaf.grad is not None) == has_one
    assert leaf.grad is None or bool((leaf.grad == 1).all())


@pytest.mark.parametrize("uses", [(True, False), (False, True), (True, True)])
def test_it_is_added_to_no_other(uses: tuple[bool, bool]) -> None:
    h = torch.randn(32, 64, requires_grad=True) * 2
    with pytest.raises(TypeError, match="where autograd adds it to another one: return"):
        sum(Encoded.apply(h).sum() if encoded else h.sum() for encoded in uses).backward()


def test_code_that_knows_it_and_stored_weights_are_left_alone() -> None:
    """Code of a user in a backward may read and add what is encoded; weights may be stored so."""
    x = torch.randn(32, 64, requires_grad=True)
    h = x * 2
    h.register_hook(lambda dy: dy.detach() + 1)
    with pytest.warns(lpq.core.PrecisionWarning):
        Encoded.apply(h).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 4).all())
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    found: list[Tensor] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.detach()))
    net(torch.randn(32, 64)).sum().backward()
    assert len(found) == 1
