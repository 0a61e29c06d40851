"""Weights that tensor parallelism and FSDP2 both share out: gathered quantized, and equal to those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import fully_shard, mesh_of, on_ranks
from sharded import decoded
from support.comparing import equal
from support.modes import Watched
from support.small_models import shared_out
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import shard_statistics
from lpq.distributed.several_matrices import ShardStatistics, spanning

WIDTH, INNER = 128, 256


def net(recipe: str, weights: Any) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))
    with torch.no_grad():
        made[0].weight[-1, -1] = made[2].weight[-1, -1] = 30.0  # on one rank alone
    return lpq.convert(made, recipe, weights=weights)


def sharded(recipe: str, weights: Any, sequence: bool = False, run: str = "", **how: Any) -> Any:
    return shared(net(recipe, weights), sequence, run, **how)


def shared(made: Any, sequence: bool = False, run: str = "", **how: Any) -> Any:
    mesh, plan = mesh_of("dp", "tp"), shared_out("0", "2", 0 if sequence else None)
    made = parallelize_module(made, mesh["tp"], plan)
    if run == "compiled":
        made[2].compile(backend="aot_eager", fullgraph=True)
    for i in (0, 2) if run == "checkpointed" else ():
        made[i] = checkpoint_wrapper(made[i])
    return fully_shard(made, mesh=mesh["dp"], **how)


def batch(seed: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def trained(made: Any) -> list[Any]:
    """Return the outputs, the gradients of inputs, and this rank's parts of the weights after two steps."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    found = []
    for step in range(2):
        x = batch(step)
        y = made(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [y.detach(), x.grad]
    return [*found, *map(decoded, made.parameters())]


@pytest.mark.parametrize(
    ("recipe", "quantized"),
    [
        ("fp8-current", (True, True)),
        ("mxfp8", (True, True)),
        ("nvfp4", (True, True)),
        ("nvfp4-eden", (True, True)),  # a rank makes its part of a column operand with the statistics of all
        ("fp8-row", (True, False)),  # a rank of tensor parallelism has parts of the rows of the second weight
        ("fp8-delayed", (False, False)),
    ],
)
@on_ranks(4)
def test_training_is_that_of_weights_in_high_precision(rank: int, recipe: str, quantized: tuple[bool, bool]) -> None:
    """With sequences that are shared out for the recipes that take part in all."""
    how = {"sequence": quantized == (True, True)}
    made = sharded(recipe, "high_precision", **how)
    assert equal(trained(made), trained(sharded(recipe, None, **how)))
    assert tuple(layer.gather.operands is not None for layer in (made[0], made[2])) == quantized
    notes = {entry.name: entry.note for entry in lpq.report(made).weights}
    assert tuple("gathered as " in notes[name] for name in "02") == quantized, notes


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
@on_ranks(4)
def test_sums_that_are_exact_are_those_of_one_process(rank: int, recipe: str) -> None:
    """Sums of few bits do not depend on which rank adds what, so outputs and gradients equal one process's."""

    def passed(made: Any) -> list[Any]:
        x = torch.randint(-2, 3, (32, WIDTH), generator=torch.Generator().manual_seed(1)).float()
        y = made(x.requires_grad_())
        y.sum().backward()
        return [y.detach(), x.grad]

    def rounded(weights: Any) -> Any:
        made = net(recipe, weights)
        made[1] = nn.ReLU()
        with torch.no_grad():
            for weight in made.parameters():
                weight.copy_((weight * 32).round().clamp(-2, 2) / 4)
        return made

    one = rounded(None)
    made = shared(rounded("high_precision"))
    assert equal(passed(made), passed(one))
    assert all(layer.gather.operands is not None for layer in (made[0], made[2]))
    with torch.no_grad():
        made[2].weight.to_local()[0, 0] += rank == 3
    assert not equal(passed(made), passed(one)), "a weight of one rank is of consequence on all"


@on_ranks(4)
def test_in_other_ways_of_running_it(rank: int) -> None:
    """Those that leave all numbers as they are train as a plain way does."""
    recipe, bf16 = "fp8-current", MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = trained(sharded(recipe, None))
    for how in ({"run": "checkpointed"}, {"reshard_after_forward": False}):
        assert equal(trained(sharded(recipe, "high_precision", **how)), expected), how  # type: ignore[arg-type]
    compiled, plain = (trained(sharded("mxfp8", "high_precision", True, run)) for run in ("compiled", ""))
    assert equal(compiled, plain)
    how = {"mp_policy": bf16, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert equal(*(trained(sharded(recipe, weights, **how)) for weights in ("high_precision", None)))
    with Watched():
        assert equal(trained(sharded(recipe, "high_precision")), expected)
    found = []
    for weights in ("high_precision", None):
        made = sharded(recipe, weights)
        if rank == 3:
            with torch.no_grad():
                made[2].weight.to_local()[0, 0] = torch.nan
        found.append(trained(made))
    assert equal(*found, nan=True)
    assert not equal(found[0], expected, nan=True), "the NaN is of consequence"


DIMS = {"matrix": (0, 1), "column": 0, "row": 1}
"""Of a matrix whose parts are measured: those that each measurement goes over."""


@on_ranks(4)
def test_statistics_that_one_launch_measures_are_reduced_over_both_axes(rank: int) -> None:
    """As on a GPU: by torch here, in place of the kernel that measures several shards."""
    measured: list[int] = []

    def measure(self: ShardStatistics, xs: Sequence[Tensor]) -> None:
        measured.append(len(xs))
        for x, stats in zip(xs, self.stats, strict=True):
            (stat,) = (stat for stat in stats if stat is not None)
            stat.copy_(x.abs().amax(DIMS[self._of]).view(stat.shape))

    def together(side: Any, direction: Any, *_: Any) -> bool:
        return len(spanning(side, direction)) < 2

    for recipe in ("fp8-row", "x=fp8, w=hybrid(row=fp8, col=fp8(scaling=row)), dy=fp8"):
        expected = trained(sharded(recipe, "high_precision"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_statistics, "can_measure_together", together)
            patch.setattr(ShardStatistics, "measure", measure)
            measured.clear()
            assert equal(trained(sharded(recipe, "high_precision")), expected), recipe
            assert measured, recipe
