"""Delayed scaling under activation checkpointing: a run that is run again computes what it computed, or is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import evaluated, offloaded, plainly, recomputed, reentrant
from support.small_models import converted
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MOVED = "activation checkpointing runs it again in backward, and its states of delayed scaling have moved"


def layer(recipe: str = "fp8-delayed") -> Any:
    return converted(recipe, 32, 32)[0]


def inputs(count: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [(torch.randn(16, 32) * (1 + 3 * i)).requires_grad_() for i in range(count)]


def found(module: Any) -> list[Tensor]:
    return [*(p.grad for p in module.parameters()), *module.buffers()]


def twice(run: Any, recipe: str) -> list[Tensor]:
    module, (x,) = layer(recipe), inputs(1)
    run(module, run(module, x)).square().mean().backward()
    return found(module)


def test_a_layer_that_runs_twice_is_refused_if_it_remembers() -> None:
    """Its second run's backward moves what the first run saw: other numbers came from that without a word."""
    assert equal(twice(recomputed, "fp8-current"), twice(plainly, "fp8-current"))
    with pytest.raises(RuntimeError, match=rf"lpq\.nn\.Linear\(32, 32\): {MOVED}.*Leave it out of checkpointing"):
        twice(recomputed, "fp8-delayed")


@pytest.mark.parametrize("between", [False, True])
def test_several_batches_before_backward_are_refused(between: bool) -> None:
    """A run between hides nothing, as in a pipeline, where forward of one batch comes between backward of others."""
    module, xs = layer(), inputs(3)
    first, second = (recomputed(module, x).sum() for x in xs[:2])
    first.backward()
    third = recomputed(module, xs[2]).sum() if between else None
    with pytest.raises(RuntimeError, match=MOVED):
        second.backward()
    if third is not None:
        third.backward()


def test_the_older_way_to_checkpoint_is_refused_for_layers_that_remember() -> None:
    reentrant(layer("fp8-current"), inputs(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"Linear\(32, 32\): .* use_reentrant=True .*use_reentrant=False"):
        reentrant(layer(), inputs(1)[0]).sum().backward()


@pytest.mark.parametrize("inner", [offloaded, recomputed])
def test_it_is_refused_under_hooks_for_saved_tensors_as_well(inner: Any) -> None:
    """Runs under such hooks were taken for runs of checkpointing that compares states: one of two had moved states."""
    module = layer()
    first, second = (reentrant(partial(inner, module), x).sum() for x in inputs(2))
    with pytest.raises(RuntimeError, match=r"Linear\(32, 32\): .* use_reentrant=True"):
        (first + second).backward()


def test_the_older_way_behind_a_layer_is_let_through() -> None:
    """A run of the newer way that begins in a node of the older way, which itself runs other modules, was refused."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.behind = layer(), torch.nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return reentrant(self.behind, self.first(x))

    plain, module = Both(), Both()
    for x in inputs(2):
        plain(x).sum().backward()
        recomputed(module, x).sum().backward()
    assert equal(found(plain), found(module))
    first, second = (recomputed(module, x).sum() for x in inputs(2))
    with pytest.raises(RuntimeError, match=MOVED):
        (first + second).backward()
    with pytest.raises(RuntimeError, match=r"Linear\(32, 32\): .* use_reentrant=True"):
        reentrant(partial(recomputed, module), inputs(1)[0]).sum().backward()


def test_one_at_a_time_and_evaluation_between_are_no_matter() -> None:
    plain, module = layer(), layer()
    for x in inputs(3):
        plain(x).sum().backward()
        y = recomputed(module, x).sum()
        with torch.no_grad():
            module(x * 9)
        y.backward()
    assert equal(found(plain), found(module))


def test_tensors_on_their_way_to_another_place_are_let_through() -> None:
    """Hooks that recompute nothing, as those that keep saved tensors elsewhere."""
    both = []
    for run in (plainly, offloaded):
        module = layer()
        for x in inputs(2):
            (run(module, x).sum() + run(module, x + 1).sum()).backward()
        both.append(found(module))
    assert equal(*both)


def test_a_selection_of_what_is_recomputed_hides_no_moved_state() -> None:
    """A policy that saves all of torch's operators kept the counts of the first run, too, and had them compared with
    themselves."""

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        recomputes = operator.namespace == "lpq"
        return CheckpointPolicy.PREFER_RECOMPUTE if recomputes else CheckpointPolicy.MUST_SAVE

    module, xs = layer(), inputs(2)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    first, second = (checkpoint(module, x, use_reentrant=False, context_fn=contexts).sum() for x in xs)
    first.backward()
    evaluated(module, xs[0])
    with pytest.raises(RuntimeError, match=MOVED):
        second.backward()


@pytest.mark.parametrize("needs_dx", [True, False])
def test_a_gradient_is_rotated_as_the_operands_that_a_selection_saves(
    needs_dx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seeds are drawn again, as the policy does not save these, and differ where the generator is not put back,
    or a random operator of torch's is saved: the gradients were noise."""
    turns = iter((1, 1, 2))  # of a run without checkpointing, of the first run, and of the second
    monkeypatch.setattr(
        torch, "randint", lambda *_, device, **__: torch.tensor([5, 6, 7], device=device) * 2**32 + next(turns)
    )

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator is torch.ops.lpq.quantize.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts, both = partial(create_selective_checkpoint_contexts, policy), []
    for run in (plainly, partial(checkpoint, use_reentrant=False, context_fn=contexts)):
        module, (x,) = layer("nvfp4-eden"), inputs(1)
        x.requires_grad_(needs_dx)
        run(module, x).square().sum().backward()
        both.append([x.grad, *found(module)])
    assert next(turns, None) is None
    assert equal(*both)


def test_the_default_device_has_no_part_in_it() -> None:
    """The counts were put there: on a GPU the host waited for them, and on the meta device there were none."""
    module, (x,) = layer(), inputs(1)
    with torch.device("meta"):
        y = recomputed(module, x)
    y.sum().backward()
    assert module.weight.grad.any()
