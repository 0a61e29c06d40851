"""Several backwards after one forward: each makes what it is asked for, and states move once, as with a single one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import products
from support.comparing import equal
from support.modes import Watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.operations import group_products

BOTH = "hybrid(row=fp8(scaling=delayed), col=fp8(scaling=delayed, dtype=e5m2))"
RECIPES = ("fp8-delayed", f"x={BOTH}, w={BOTH}, dy={BOTH}", "x=fp8(scaling=delayed), w=mxfp8, dy=mxfp8")
Backward = Callable[[Tensor, Tensor, list[nn.Parameter]], Any]


def in_one(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    y.backward()


def input_first(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    """As a zero-bubble schedule does."""
    (x.grad,) = torch.autograd.grad(y, x, retain_graph=True)
    for weight, grad in zip(weights, torch.autograd.grad(y, weights), strict=True):
        weight.grad = grad


def weights_first(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    for weight, grad in zip(weights, torch.autograd.grad(y, weights, retain_graph=True), strict=True):
        weight.grad = grad
    (x.grad,) = torch.autograd.grad(y, x)


def again_in_one(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()


def twice(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    y.backward(inputs=[x, *weights], retain_graph=True)
    torch.autograd.grad(y, [x, *weights])


def layer(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return lpq.nn.Linear(32, 64, bias=recipe in ("fp8-delayed", "mxfp8"), recipe=recipe)


def steps(module: nn.Module, backward: Backward, checkpointed: bool = False) -> list[Tensor]:
    """The gradients of some steps, and the states behind them."""
    found: list[Tensor] = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = (torch.randn(16, 32, generator=draw) * (1 + 3 * step)).requires_grad_()
        y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
        backward(y.square().mean(), x, [p for p in module.parameters() if p.requires_grad])
        found += [t.grad.clone() for t in (x, *module.parameters()) if t.grad is not None]
        module.zero_grad()
    return [*found, *(b.clone() for b in module.buffers())]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backward", [input_first, weights_first, again_in_one, twice])
def test_states_move_once_and_gradients_are_those_of_one_backward(recipe: str, backward: Backward) -> None:
    module = layer(recipe)
    expected = steps(copy.deepcopy(module), in_one)
    assert equal(steps(copy.deepcopy(module), backward), expected)
    with Watched():
        assert equal(steps(copy.deepcopy(module), backward), expected)
    if backward not in (twice, weights_first):  # which would run forward again after its states have moved
        assert equal(steps(copy.deepcopy(module), backward, checkpointed=True), expected)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    assert not equal(steps(module, backward), expected)


def test_a_checkpointed_layer_refuses_a_second_whole_backward() -> None:
    with pytest.raises(RuntimeError, match=r"has moved since it ran: .* or a whole backward runs twice"):
        steps(layer("fp8-delayed"), twice, checkpointed=True)


def test_a_gradient_of_the_input_alone_is_no_step() -> None:
    """A pipeline asks for it to infer shapes, of memory that no data fills."""
    module = layer("fp8-delayed")
    before = copy.deepcopy(module.state_dict())
    x = torch.full((16, 32), 5e19, requires_grad=True)
    torch.autograd.grad(module(x).sum(), x)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert equal(steps(module, input_first), steps(layer("fp8-delayed"), in_one))


def test_a_frozen_layer_moves_in_its_first_backward_and_refuses_a_part() -> None:
    """No gradient of a weight tells a step from a pass that infers shapes."""

    def frozen() -> nn.Module:
        return layer("fp8-delayed").requires_grad_(requires_grad=False)

    def whole_and_again(y: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
        y.backward(retain_graph=True)
        torch.autograd.grad(y, x)

    found = steps(frozen(), whole_and_again)
    assert equal(found, steps(frozen(), in_one))
    assert all(t.any() for t in found)
    module, x = frozen(), torch.full((16, 32), 5e19, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Linear\(32, 64\): its weight is frozen, .* input_args= and output_args="):
        torch.autograd.grad(module(x).sum(), x)
    assert not any(t.any() for t in module.buffers())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
@pytest.mark.parametrize("watched", [False, True])
def test_each_backward_makes_the_product_that_it_is_asked_for(
    recipe: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = products(monkeypatch)
    module, x = layer(recipe), torch.randn(16, 32, requires_grad=True)
    weight, bias = module.parameters()
    with Watched() if watched else torch.enable_grad():
        y = module(x).sum()
        for asked, sizes in (
            ([x], [(16, 64, 32)]),
            ([weight], [(64, 16, 32)]),
            ([bias], []),
            ([x, weight, bias], [(16, 64, 32), (64, 16, 32)]),
        ):
            made.clear()
            torch.autograd.grad(y, asked, retain_graph=True)
            assert [(p.a.shape[0], p.a.shape[1], p.b.shape[0]) for p in made] == sizes


def test_a_grouped_layer_makes_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("multiply_rows", "multiply_columns"):
        run = getattr(group_products, f"{name}_reference")
        counted = lambda *a, run=run, name=name: (made.append(name), run(*a))[1]  # noqa: E731
        monkeypatch.setattr(group_products, f"{name}_reference", counted)
    grouped = lpq.nn.GroupedLinear(2, 32, 64, recipe="mxfp8")
    x = torch.randn(16, 32, requires_grad=True)
    y = grouped(x, [10, 6]).sum()
    for asked, names in ((x, ["multiply_rows"]), (grouped.weight, ["multiply_columns"]), (grouped.bias, [])):
        made.clear()
        torch.autograd.grad(y, asked, retain_graph=True)
        assert made == names


def test_a_compiled_layer_that_remembers_refuses_to_be_asked_for_a_part() -> None:
    """Its backward makes all gradients each time, and would count a step for each."""
    torch._dynamo.reset()  # else it may know from another test that it leaves such a layer uncompiled
    module = layer("fp8-delayed")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(16, 32, requires_grad=True)
    for ask in (lambda y: torch.autograd.grad(y, x), lambda y: y.backward(inputs=[x])):
        with pytest.raises(
            RuntimeError, match=r"a compiled layer whose recipe remembers .* input_args= and output_args="
        ):
            ask(compiled(x).sum())
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert equal(steps(compiled, in_one), steps(layer("fp8-delayed"), in_one))
