"""Delayed scaling under activation checkpointing: a run that is run again computes what it computed, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq

MOVED = "activation checkpointing runs it again in backward, and what it remembers for delayed scaling has moved"
Run = Callable[[nn.Module, Tensor], Tensor]


def layer(recipe: str = "fp8-delayed") -> lpq.nn.Linear:
    torch.manual_seed(3)
    return lpq.nn.Linear(32, 32, recipe=recipe)


def inputs(count: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [(torch.randn(16, 32) * (1 + 3 * i)).requires_grad_() for i in range(count)]


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(module, x, use_reentrant=False)
    return y


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def steps(module: nn.Module, run: Run, twice: bool) -> list[Tensor]:
    for x in inputs(1 if twice else 3):  # a sum of two is the same in any order
        y = run(module, x)
        if twice:
            y = run(module, y)
        y.square().mean().backward()
    return [*gradients(module), *module.buffers()]


def test_a_layer_that_runs_twice_is_refused() -> None:
    """Its second run's backward moves what the first run saw: other numbers came from that without a word."""
    module = layer()
    with pytest.raises(RuntimeError, match=rf"lpq\.nn\.Linear\(32, 32\): {MOVED}.*Leave it out of checkpointing"):
        steps(module, checkpointed, twice=True)


@pytest.mark.parametrize(("recipe", "twice"), [("fp8-delayed", False), ("fp8-current", True)])
def test_others_compute_what_they_compute_without(recipe: str, twice: bool) -> None:
    a, b = layer(recipe), layer(recipe)
    for mine, theirs in zip(steps(a, plainly, twice), steps(b, checkpointed, twice), strict=True):
        assert torch.equal(mine, theirs)


def test_several_batches_before_backward_are_refused() -> None:
    module, run = layer(), checkpointed
    first, second = (run(module, x).sum() for x in inputs(2))
    first.backward()
    with pytest.raises(RuntimeError, match=MOVED):
        second.backward()


def test_a_run_between_hides_nothing() -> None:
    """As in a pipeline, where forward of one batch comes between the backward of others."""
    module, run = layer(), checkpointed
    xs = inputs(3)
    first, second = (run(module, x).sum() for x in xs[:2])
    first.backward()
    third = run(module, xs[2]).sum()
    with pytest.raises(RuntimeError, match=MOVED):
        second.backward()
    third.backward()


def test_the_older_way_to_checkpoint_is_refused_for_layers_that_remember() -> None:
    for recipe, refused in (("fp8-current", False), ("fp8-delayed", True)):
        y = checkpoint(layer(recipe), inputs(1)[0], use_reentrant=True).sum()
        if refused:
            with pytest.raises(RuntimeError, match=r"Linear\(32, 32\): .* use_reentrant=True .*use_reentrant=False"):
                y.backward()
        else:
            y.backward()


def test_one_at_a_time_and_evaluation_between_are_no_matter() -> None:
    plain = layer()
    module = copy.deepcopy(plain)
    run = checkpointed
    for x in inputs(3):
        plain(x).sum().backward()
        y = run(module, x).sum()
        with torch.no_grad():
            module(x * 9)
        y.backward()
    assert equal(plain.buffers(), module.buffers())
    assert equal(gradients(plain), gradients(module))


def test_tensors_on_their_way_to_another_place_are_let_through() -> None:
    """Hooks that recompute nothing, as those that keep saved tensors elsewhere."""
    plain, module = layer(), layer()
    for x in inputs(2):
        with torch.autograd.graph.save_on_cpu():
            y, z = module(x), module(x + 1)
        (y.sum() + z.sum()).backward()
        (plain(x).sum() + plain(x + 1).sum()).backward()
    assert equal(gradients(plain), gradients(module))
