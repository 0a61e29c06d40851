"""Every recipe with a name on two ranks that share out layers or experts, which compute what one process does."""

from __future__ import annotations

from collections.abc import Callable

import counted_format
import double_format
import pytest
import residual_format
import torch
import value_formats
from ranks import mesh_of, on_one, on_ranks
from support.comparing import equal
from test_expert_parallel import EXPERTS, Experts, mine_of, of_all, rows
from test_tensor_parallel import agree, alone, run
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.nn import functional
from lpq.nn.plan import Plan
from lpq.torch_private.tensors import local_part

NAMED = sorted(lpq.registry.recipes())
THIRD_PARTIES = ("int4()", "counted()", value_formats.NAMES[1], "residual(base=fp8, rest=mxfp8)", "double")
BATCHES = (1.0, -3.0)
"""The factors of two micro-batches, whose gradients are summed."""


@on_ranks(2)
def test_layers_that_ranks_share_out(rank: int) -> None:
    """Over two micro-batches, to the order of sums, in which parts that are products in bf16 are rounded to it; and not
    what another recipe computes: with one copy all but subnormal numbers equal the numbers of the recipe before, and so
    does a first step that is measured."""
    expected = {recipe: alone(recipe, True, BATCHES) for recipe in NAMED}
    for i, recipe in enumerate(NAMED):
        in_bf16 = "bf16" in recipe or "decoded" in recipe
        found, within = run(recipe, True, True, factors=BATCHES), 1e-2 if in_bf16 else 1e-5
        agree(found, expected[recipe], within, recipe)
        before = NAMED[i - (2 if "one-copy" in recipe or recipe == "nvfp4-eden-delayed" else 1)]
        with pytest.raises(AssertionError):
            agree(found, expected[before], within)


def _seeds(rank: int | None) -> Callable[..., Tensor]:
    """Seeds by which an expert is rounded with the same random bits on any rank."""
    every = torch.arange(3 * EXPERTS) << 33
    return lambda x, owner, count: every[(rank or 0) * count :][:count]


def _experts(recipe: str, rank: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of rows, and the summed gradients of experts."""
    net = Experts(recipe)
    if rank is not None:
        parallelize_module(net, mesh_of(), ExpertParallel())
    for layer in (net.up, net.down):
        for value in layer.static_values().values():
            value.fill_(50.0)
    x, dy, ends = of_all(range(2)) if rank is None else rows(rank)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "draw_seeds", _seeds(rank))
        for factor in BATCHES:
            own = (x * factor).requires_grad_()
            y = net(own, ends)
            y.backward(dy)
            assert own.grad is not None
            found += [y.detach(), own.grad]
    return found, [local_part(p.grad) for p in net.parameters()]


def _shared_experts(rank: int, recipes: list[str]) -> None:
    ends, different = of_all(range(2))[2], set()
    for recipe in recipes:
        (found, gradients), (expected, stacks) = _experts(recipe, rank), on_one(_experts, recipe, None)
        expected = [mine_of(tensor, ends, rank, 2) for tensor in expected]
        found = [tensor[: len(expected[0])] for tensor in found]  # without rows that go nowhere
        assert equal(found, expected), recipe
        assert equal(gradients, (tensor.chunk(2)[rank] for tensor in stacks)), recipe
        different.add(tuple(tensor.sum().item() for tensor in (*found, *gradients)))
    assert len(different) > len(recipes) // 2  # or the recipes would not be used


@on_ranks(2)
def test_experts_that_ranks_share_out(rank: int) -> None:
    """Over two micro-batches, to the bit: all that no step moves, which experts refuse."""
    moving = [recipe for recipe in NAMED if Plan.of(lpq.recipe(recipe)).moving]
    assert "fp8-delayed" in moving
    _shared_experts(rank, [recipe for recipe in NAMED if recipe not in moving])


def register() -> None:
    for formats in (counted_format, double_format, value_formats, residual_format):
        formats.register()


def recipe_of(text: str) -> str:
    """One format for all three tensors."""
    return f"x={text}, w={text}, dy={text}"


@pytest.mark.usefixtures("int4")
@on_ranks(2)
def test_every_format_of_experts_that_ranks_share_out(rank: int) -> None:
    """Formats that no recipe of lpq's names."""
    register()
    _shared_experts(rank, [recipe_of(text) for text in THIRD_PARTIES])
