"""Several backwards after one forward: each makes what it is asked for, and states move once, as with a single one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting import products
from support.comparing import equal, equal_states
from support.passes import Run, plainly, recomputed, watched
from support.small_models import LlamaMlp, converted
from torch import Tensor

import lpq
from lpq.operations import group_products

BOTH = "hybrid(row=fp8(scaling=delayed), col=fp8(scaling=delayed, dtype=e5m2))"
RECIPES = ("fp8-delayed", f"x={BOTH}, w={BOTH}, dy={BOTH}", "x=fp8(scaling=delayed), w=mxfp8, dy=mxfp8")
BACKWARDS = ("x w", "w x", "x xw", "xw xw")
"""The gradients that each backward asks for: first of the input, as a zero-bubble schedule does, or of the weights."""


def layer(recipe: str = "fp8-delayed") -> Any:
    return converted(recipe, 32, 64)[0]


def given(step: int = 0) -> Tensor:
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + 3 * step)).requires_grad_()


def steps(module: Any, backwards: str = "", run: Run = plainly) -> list[Tensor]:
    """The gradients of some steps, and the states behind them; of one ordinary backward, if none are named."""
    found: list[Tensor] = []
    for step in range(3):
        x, weights = given(step), [p for p in module.parameters() if p.requires_grad]
        y = run(module, x).square().mean()
        if not backwards:
            y.backward()
        for part in (parts := backwards.split()):
            asked = [*([x] if "x" in part else []), *(weights if "w" in part else [])]
            for tensor, grad in zip(
                asked, torch.autograd.grad(y, asked, retain_graph=part is not parts[-1]), strict=True
            ):
                tensor.grad = grad
        found += [t.grad.clone() for t in (x, *module.parameters()) if t.grad is not None]
        module.zero_grad()
    return [*found, *(b.clone() for b in module.buffers())]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backwards", BACKWARDS)
def test_states_move_once_and_gradients_are_those_of_one_backward(recipe: str, backwards: str) -> None:
    expected = steps(layer(recipe))
    for run in (plainly, watched, recomputed):
        if run is recomputed and backwards in ("w x", "xw xw"):
            continue  # forward would run again after its states have moved
        assert equal(steps(layer(recipe), backwards, run), expected)
    module = layer(recipe)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    assert not equal(steps(module, backwards), expected)


KEPT = f"x={BOTH}, w={BOTH}, dy={BOTH}, x.save=input, w.save=weight"


@pytest.mark.parametrize("recipe", [*RECIPES, KEPT])
@pytest.mark.parametrize("run", [plainly, watched])
@pytest.mark.parametrize("fused", [False, True])
def test_a_second_whole_backward_makes_the_gradients_of_the_first(recipe: str, run: Run, fused: bool) -> None:
    """It encoded the gradient by the state that the first one had moved."""
    module: Any = lpq.convert(LlamaMlp(32, 64), recipe, fuse=True) if fused else layer(recipe)
    for step in range(2):
        module(given(step)).square().mean().backward()
    before = [*module.buffers()][-1].clone()
    x = given(3)
    y, found = run(module, x), list[list[Tensor]]()
    for number in range(3):
        module.zero_grad()
        x.grad = None
        y.backward(y.detach() * 9, retain_graph=number < 2)
        found.append([t.clone() for t in (x.grad, *(p.grad for p in module.parameters()), *module.buffers())])
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    assert not torch.equal(found[0][-1], before)  # control: the first one moved the states


def test_a_checkpointed_layer_refuses_a_second_whole_backward() -> None:
    with pytest.raises(RuntimeError, match=r"have moved since it ran: .* or a whole backward runs twice"):
        steps(layer(), "xw xw", recomputed)


def test_a_gradient_of_the_input_alone_is_no_step() -> None:
    """A pipeline asks for it to infer shapes, of memory that no data fills."""
    module = layer()
    before = copy.deepcopy(module.state_dict())
    x = torch.full((16, 32), 5e19, requires_grad=True)
    torch.autograd.grad(module(x).sum(), x)
    assert equal_states(module.state_dict(), before)
    assert equal(steps(module, "x w"), steps(layer()))


def test_a_frozen_layer_moves_in_its_first_backward_and_refuses_a_part() -> None:
    """No gradient of a weight tells a step from a pass that infers shapes."""
    once, again = (layer().requires_grad_(requires_grad=False) for _ in range(2))
    for module in (once, again):
        for step in range(3):
            x = given(step)
            y = module(x).square().mean()
            y.backward(retain_graph=True)
            if module is again:
                torch.autograd.grad(y, x)
    assert equal(again.buffers(), once.buffers())
    assert all(t.any() for t in again.buffers())
    module, x = layer().requires_grad_(requires_grad=False), torch.full((16, 32), 5e19, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Linear\(32, 64\): its weight is frozen, .* input_args= and output_args="):
        torch.autograd.grad(module(x).sum(), x)
    assert not any(t.any() for t in module.buffers())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
@pytest.mark.parametrize("run", [plainly, watched])
def test_each_backward_makes_the_product_that_it_is_asked_for(
    recipe: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = products(monkeypatch)
    module, x, of_x, of_w = layer(recipe), given(), (16, 64, 32), (64, 16, 32)
    weight, bias = module.parameters()
    y = run(module, x).sum()
    for asked, sizes in (([x], [of_x]), ([weight], [of_w]), ([bias], []), ([x, weight, bias], [of_x, of_w])):
        made.clear()
        run(lambda y, asked=asked: torch.autograd.grad(y, asked, retain_graph=True)[0], y)
        assert [(p.a.shape[0], p.a.shape[1], p.b.shape[0]) for p in made] == sizes


def test_a_grouped_layer_makes_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    run = group_products.multiply_reference

    def counted(p: Any, *given: Any) -> Tensor:
        made.append("columns" if p.a.dim else "rows")
        return run(p, *given)

    monkeypatch.setattr(group_products, "multiply_reference", counted)
    grouped, x = lpq.nn.GroupedLinear(2, 32, 64, recipe="mxfp8"), given()
    y = grouped(x, [10, 6]).sum()
    for asked, names in ((x, ["rows"]), (grouped.weight, ["columns"]), (grouped.bias, [])):
        made.clear()
        torch.autograd.grad(y, asked, retain_graph=True)
        assert made == names


KEEPS = r"^retain_graph=True: a compiled layer .* Leave retain_graph out if .* sum of the losses, leave"


def test_a_compiled_layer_that_remembers_refuses_to_be_asked_for_a_part() -> None:
    """Its backward makes all gradients each time, and would count a step for each."""
    torch._dynamo.reset()  # else it may know from another test that it leaves such a layer uncompiled
    module, x = layer(), given()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    before = copy.deepcopy(module.state_dict())
    for ask in (lambda y: torch.autograd.grad(y, x), lambda y: y.backward(inputs=[x])):
        words = r"compiled layer whose recipe remembers .* input_args= and output_args="
        with pytest.raises(RuntimeError, match=words):
            ask(compiled(x).sum())
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False), pytest.raises(RuntimeError, match=KEEPS):
        compiled(x).sum().backward(retain_graph=True)  # which torch refuses where it may write to what is kept
    assert equal_states(module.state_dict(), before)
    assert equal(steps(compiled), steps(layer()))


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no backward")
def test_a_backward_that_is_traced_with_its_forward_is_a_step() -> None:
    """It runs outside of any backward, where torch says that a graph is kept."""
    torch._dynamo.reset()
    module, twin, x = layer(), layer(), given()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        whole = torch.compile(
            lambda x: torch.autograd.grad(module(x).square().mean(), [*module.parameters()]), backend="aot_eager",
            fullgraph=True,
        )  # fmt: skip
        grads = whole(x)
    twin(x).square().mean().backward()
    assert equal(grads, [p.grad for p in twin.parameters()])
    assert equal_states(module.state_dict(), twin.state_dict())
