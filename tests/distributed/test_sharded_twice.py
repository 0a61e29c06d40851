"""Weights that tensor parallelism and FSDP2 both share out: gathered quantized, and equal to those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks, spawn
from support.modes import Watched
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import weight_gather
from lpq.distributed.several_matrices import ShardStatistics, spanning
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

WIDTH, INNER = 128, 256


def net(recipe: str, weights: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))
    with torch.no_grad():
        made[0].weight[-1, -1] = made[2].weight[-1, -1] = 30.0  # on one rank alone
    return lpq.convert(made, recipe, weights=weights)


def sharded(recipe: str, weights: Any, sequence: bool = False, run: str = "", **how: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = Shard(0) if sequence else None
    plan = {"0": ColwiseParallel(input_layouts=rows), "2": RowwiseParallel(output_layouts=rows)}
    made = parallelize_module(net(recipe, weights), mesh["tp"], plan)
    for i in (0, 2):
        if run == "compiled":
            made[i].compile(backend="aot_eager", fullgraph=True)
        if run == "checkpointed":
            made[i] = checkpoint_wrapper(made[i])
    return fully_shard(made, mesh=mesh["dp"], **how)


def trained(made: Any) -> list[Tensor]:
    """Return the outputs, the gradients of inputs, and this rank's parts of the weights after two steps."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    found = []
    for step in range(2):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = made(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    for parameter in made.parameters():
        local = parameter.detach().to_local()
        found.append(getattr(local, "held", local).clone())
    return found


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "quantized"),
    [
        ("fp8-current", (True, True)),
        ("mxfp8", (True, True)),
        ("nvfp4", (True, True)),
        ("fp8-row", (True, False)),  # a rank of tensor parallelism has parts of the rows of the second weight
        ("fp8-delayed", (False, False)),
    ],
)
@on_ranks(4)
def test_training_is_that_of_weights_in_high_precision(rank: int, recipe: str, quantized: tuple[bool, bool]) -> None:
    for how in ({}, {"sequence": True}):
        expected = trained(sharded(recipe, None, **how))
        made = sharded(recipe, "high_precision", **how)
        assert all(same(trained(made), expected)), how
    assert tuple(layer.gather.operands is not None for layer in (made[0], made[2])) == quantized
    notes = {entry.name: entry.note for entry in lpq.report(made).weights}
    for name, is_quantized in zip("02", quantized, strict=True):
        assert ("gathered as " in notes[name]) == is_quantized, notes


@on_ranks(4)
def test_in_other_ways_of_running_it(rank: int) -> None:
    """Those that leave all numbers as they are train as a plain way does."""
    recipe, bf16 = "fp8-current", MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = trained(sharded(recipe, None))
    for how in ({"run": "checkpointed"}, {"run": "compiled"}, {"reshard_after_forward": False}):
        assert all(same(trained(sharded(recipe, "high_precision", **how)), expected)), how
    how = {"mp_policy": bf16, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert all(same(trained(sharded(recipe, "high_precision", **how)), trained(sharded(recipe, None, **how))))
    torch.compiler.reset()
    with Watched():
        watched = trained(sharded(recipe, "high_precision"))
    assert all(same(watched, expected))
    found = []
    for weights in ("high_precision", None):
        made = sharded(recipe, weights)
        if rank == 3:
            with torch.no_grad():
                made[2].weight.to_local()[0, 0] = torch.nan
        found.append([t.nan_to_num(7.0) for t in trained(made)])
    assert all(same(*found))
    assert not all(same(found[0], watched)), "the NaN is of consequence"


@on_ranks(4)
def test_statistics_that_one_launch_measures_are_reduced_over_both_axes(rank: int) -> None:
    """As on a GPU: by torch here, in place of the kernel that measures several shards."""
    measured: list[int] = []

    def measure(self: ShardStatistics, xs: Sequence[Tensor]) -> None:
        measured.append(len(xs))
        for x, stats in zip(xs, self.stats, strict=True):
            (stat,) = (stat for stat in stats if stat is not None)
            stat.copy_(x.abs().amax(0 if self._columns else (0, 1)).view(stat.shape))

    for recipe in ("fp8-current", "fp8-row", "x=fp8, w=hybrid(row=fp8, col=fp8(scaling=row)), dy=fp8"):
        expected = trained(sharded(recipe, "high_precision"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                weight_gather, "measured_together", lambda side, direction, *_: len(spanning(side, direction)) < 2
            )
            patch.setattr(ShardStatistics, "measure", measure)
            measured.clear()
            assert all(same(trained(sharded(recipe, "high_precision")), expected)), recipe
            assert measured, recipe


def _saved(rank: int, folder: str) -> None:
    made = sharded("mxfp8", "high_precision")
    trained(made)
    lpq.checkpoint.save(made, folder)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
    for weights in (None, "high_precision"):
        other = sharded("mxfp8", weights)
        assert not torch.equal(other(x), made(x))
        other = sharded("mxfp8", weights)
        lpq.checkpoint.load(other, folder)
        assert torch.equal(other(x), made(x))


def test_a_checkpoint_goes_on_with_either_kind_of_weights(tmp_path: Path) -> None:
    spawn(_saved, 4, str(tmp_path))


@on_ranks(4)
def test_gathered_weights_are_parts_of_those_of_one_process(rank: int) -> None:
    for recipe in ("fp8-current", "mxfp8", "nvfp4"):
        made, one = sharded(recipe, "high_precision", reshard_after_forward=False), net(recipe, None)
        with torch.no_grad():
            made(torch.zeros(64, WIDTH))
        for number, dim in ((0, 0), (2, 1)):
            quantizer, whole, part = one[number].recipe.w, one[number].weight.detach(), made[number].weight.to_local()
            expected = quantizer.quantize(whole).chunk(2, dim)[rank % 2]
            alone = quantizer.quantize(whole.chunk(2, dim)[rank % 2].contiguous())
            for direction in ("row", "col"):
                own, parts, by_itself = (t.operand(direction).tensors() for t in (part, expected, alone))
                assert all(same(own, parts)), (recipe, number, direction)
                if recipe != "mxfp8" and rank % 2 == 0:
                    assert not all(same(own, by_itself)), "the other rank of the pair has the largest value"
