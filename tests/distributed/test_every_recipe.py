"""Every recipe with a name on two ranks that share out layers or experts, which compute what one process does."""

from __future__ import annotations

from collections.abc import Callable

import counted_format
import pytest
import residual_format
import torch
import value_formats
from ranks import spawn
from test_expert_parallel import EXPERTS, Experts, mine_of, of_all, rows
from test_tensor_parallel import agree, data, model, plan, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.nn import functional
from lpq.torch_private.tensors import local_part

NAMED = sorted(lpq.registry.recipes())
THIRD_PARTIES = ("mxfp4()", "counted()", value_formats.NAMES[1], "residual(base=fp8, rest=mxfp8)")
BATCHES = (1.0, -3.0)
"""The factors of two micro-batches, whose gradients are summed."""


def _layers(recipe: str, rank: int | None) -> dict[str, Tensor]:
    """Outputs and summed gradients of one process, or of two ranks that share out the layers and the sequence."""
    net = model(bias=True)
    lpq.convert(net, recipe)
    mesh = init_device_mesh("cpu", (2,))
    if rank is not None:
        parallelize_module(net, mesh, plan(sequence=True))
    torch.manual_seed(1)  # of random bits
    found = {}
    for factor in BATCHES:
        x, dy = (t * factor for t in data())
        if rank is not None:
            x, dy = (t.chunk(2, 1)[rank].contiguous() for t in (x, dy))
        y = net(x.requires_grad_())
        y.backward(dy)
        assert x.grad is not None
        for name, made in ((f"y {factor}", y.detach()), (f"dx {factor}", x.grad)):
            found[name] = made if rank is None else DTensor.from_local(made, mesh, [Shard(1)]).full_tensor()
    return found | {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def _shared_layers(rank: int, recipe: str, other: str) -> None:
    """To the order of sums, in which parts that are products in bf16 are rounded to it; and not what another recipe
    computes."""
    found, within = _layers(recipe, rank), 1e-2 if "bf16" in recipe else 1e-5
    agree(found, _layers(recipe, None), within)
    with pytest.raises(AssertionError):
        agree(found, _layers(other, None), within)


@pytest.mark.parametrize("recipe", NAMED)
def test_layers_that_ranks_share_out(recipe: str) -> None:
    """Over two micro-batches."""
    spawn(_shared_layers, 2, recipe, NAMED[NAMED.index(recipe) - 1])


def _seeds(rank: int | None) -> Callable[..., Tensor]:
    """Seeds by which an expert is rounded with the same random bits on any rank."""
    every = torch.arange(3 * EXPERTS) << 33
    return lambda x, owner, count: every[(rank or 0) * count :][:count]


def _experts(recipe: str, rank: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of rows, and the summed gradients of experts."""
    functional.draw_seeds = _seeds(rank)  # type: ignore[attr-defined]
    net = Experts(recipe)
    if rank is not None:
        parallelize_module(net, init_device_mesh("cpu", (2,)), ExpertParallel())
    for layer in (net.up, net.down):
        for value in layer.static_values().values():
            value.fill_(50.0)
    x, dy, ends = of_all(range(2)) if rank is None else rows(rank)
    found = []
    for factor in BATCHES:
        own = (x * factor).requires_grad_()
        y = net(own, ends)
        y.backward(dy)
        assert own.grad is not None
        found += [y.detach(), own.grad]
    return found, [local_part(p.grad) for p in net.parameters()]


def _shared_experts(rank: int, recipes: list[str]) -> None:
    draw, ends = functional.draw_seeds, of_all(range(2))[2]  # type: ignore[attr-defined]
    different = set()
    try:
        for recipe in recipes:
            (found, gradients), (expected, stacks) = _experts(recipe, rank), _experts(recipe, None)
            expected = [mine_of(tensor, ends, rank, 2) for tensor in expected]
            found = [tensor[: len(expected[0])] for tensor in found]  # without rows that go nowhere
            assert all(map(torch.equal, found, expected)), recipe
            assert all(map(torch.equal, gradients, (tensor.chunk(2)[rank] for tensor in stacks))), recipe
            different.add(tuple(tensor.sum().item() for tensor in (*found, *gradients)))
    finally:
        functional.draw_seeds = draw  # type: ignore[attr-defined]
    assert len(different) > len(recipes) // 2  # or the recipes would not be used


def test_experts_that_ranks_share_out() -> None:
    """Over two micro-batches, to the bit."""
    spawn(_shared_experts, 2, [recipe for recipe in NAMED if recipe != "fp8-delayed"])


def register() -> None:
    for formats in (counted_format, value_formats, residual_format):
        formats.register()


def recipe_of(text: str) -> str:
    """One format for all three tensors."""
    return f"x={text}, w={text}, dy={text}"


def _experts_of_others(rank: int) -> None:
    register()
    _shared_experts(rank, [recipe_of(text) for text in THIRD_PARTIES])


def test_every_format_of_experts_that_ranks_share_out(mxfp4: None) -> None:
    """Formats that no recipe of lpq's names."""
    spawn(_experts_of_others, 2)
