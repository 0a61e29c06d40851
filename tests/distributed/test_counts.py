"""Statistics that are summed over ranks, and a second round of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import counted_format
import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, on_ranks
from sharded import parts
from support.comparing import equal_states
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.core import remember
from lpq.distributed.shardability import why_not
from lpq.kernels import table
from lpq.operations import reduce_statistics
from lpq.operations.measuring import measure
from lpq.registry import KernelSpec, PluginError

ROWS, COLS, RANKS = 64, 48, 2


def _whole() -> Tensor:
    """Few elements exceed half of the amax, all of them on the last rank, of which they are not few."""
    x = torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.4
    x[-1] += 0.6
    x[-1, 0] = 1.0
    return x


def _own(x: Tensor) -> Tensor:
    return x.chunk(RANKS)[dist.get_rank()]


def _written() -> lpq.QuantizedTensor:
    """By an optimizer, to a shard."""
    shard = lpq.quantizer("counted").quantize(torch.ones(ROWS // RANKS, COLS), amax_group=dist.group.WORLD)
    shard.copy_(_own(_whole()))
    return shard


@pytest.mark.parametrize("reduced", [True, False])
@on_ranks(RANKS)
def test_a_shard_that_is_written_to_is_a_part_of_the_whole(rank: int, reduced: bool) -> None:
    counted_format.register()
    whole = lpq.quantizer("counted").quantize(_whole())
    assert whole.row.above == COLS
    assert whole.row.scale == 0.5 / 127 * torch.ones(())
    with pytest.MonkeyPatch.context() as patch:
        if not reduced:
            patch.setattr(reduce_statistics, "reduce_sum", lambda values, group: list(values))
        shard = _written()
    size = ROWS // RANKS
    assert equal_states(parts(shard), parts(whole[rank * size : rank * size + size])) is reduced


@on_ranks(RANKS)
def test_counts_beyond_fp32_are_exact(rank: int) -> None:
    """More elements than fp32 can count; those of one rank and those of all have sums that it cannot hold."""
    counted_format.register()
    x, q = torch.ones(4098, 4097), lpq.quantizer("counted")
    assert x.numel() > 2**24
    shard = q.quantize(x.chunk(RANKS)[rank], col=False, amax_group=dist.group.WORLD)
    assert shard.row.above == x.numel()
    assert shard.row.scale == torch.ones(()) / 127
    counts = torch.tensor([2**24 + 1 + rank, 2**40 + rank, 0])
    assert reduce_statistics.reduce_sum([counts], dist.group.WORLD)[0].tolist() == [2**25 + 3, 2**41 + 1, 0]


# ---------------------------------------------------------------------------------- negative values


@on_ranks(RANKS)
def test_negative(rank: int) -> None:
    """States are combined by MAX as numbers, and a NaN, whatever its sign, is above all."""
    nan = torch.nan
    mine = torch.tensor([[-3.0, -0.5, 2.0, -nan, -torch.inf, 0.0], [-2.0, -4.0, -1.0, 1.0, -9.0, -0.0]][rank])
    reductions = reduce_statistics.Reductions()
    reductions.add([mine], dist.group.WORLD, [()])
    reductions.run()
    assert mine[3].isnan()
    assert mine[[0, 1, 2, 4, 5]].tolist() == [-2.0, -0.5, 2.0, -9.0, 0.0]


@pytest.mark.parametrize("prepare", [fully_shard, partial(DistributedDataParallel, broadcast_buffers=False)])
@pytest.mark.parametrize(("recipe", "x"), [("x=counted_signed, w=bf16, dy=bf16", "row_low"), ("fp8-delayed", "amax")])
@on_ranks(RANKS)
def test_ranks_with_inputs_of_their_own_remember_the_largest(rank: int, recipe: str, x: str, prepare: Any) -> None:
    """After a step a state is the state of the largest statistic of all ranks; these have inputs of other sizes, and
    the larger one first on one rank, then on the other."""
    counted_format.register()
    net = lpq.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), recipe)
    layer, quantizer = net[0], lpq.recipe(recipe).x
    assert quantizer is not None
    state, net = quantizer.new_state(), prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for larger in (0, 1, 1):
        parts = [torch.full((16, 32), 2.0 if one == larger else 0.5) for one in range(RANKS)]
        net(parts[rank]).sum().backward()
        optimizer.step()
        remember(quantizer, state, [torch.cat(parts).amax()], col=False)
        assert torch.equal(getattr(layer, f"x_{x}"), state[x]), larger


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("below", "measure returned low below 0, and ranks combine the bits"),
        (
            "floats",
            r"Floats\.measure returned nonzero as torch\.float32; Floats\.stats declares torch\.int64.*is an int64",
        ),
    ],
)
def test_statistics_that_ranks_cannot_combine_are_refused(name: str, words: str) -> None:
    """In one process, too: in the first call."""
    counted_format.register()
    with pytest.raises(PluginError, match=words):
        lpq.quantizer(f"counted_{name}").quantize(torch.randn(32, 32))


def _unlike() -> Tensor:
    """Few elements of all are above half the largest, and of those of the first rank there are more than a few."""
    x = torch.full((256, COLS), 0.4)
    x[:4] = 1.0
    return x


@on_ranks(RANKS)
def test_counts_of_plugin_interface_1_are_those_of_one_process(rank: int) -> None:
    counted_format.register_old()
    whole = lpq.quantizer("oldcounts").quantize(_unlike())
    assert whole.row.scale == 0.5 / 127 * torch.ones(())
    size = 256 // RANKS
    own, expected = _own(_unlike()), parts(whole[rank * size : rank * size + size])
    shard = lpq.quantizer("oldcounts").quantize(own, amax_group=dist.group.WORLD)
    assert equal_states(parts(shard), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_statistics, "reduce_sum", lambda values, group: list(values))
        shard.copy_(own)
    assert not equal_states(parts(shard), expected)
    if rank == 0:
        assert shard.row.scale != whole.row.scale


def test_counts_of_plugin_interface_1_are_integers_outside_of_the_plugin() -> None:
    counted_format.register()
    counted_format.register_old()
    x = torch.randn(64, 96)
    old, new = lpq.quantizer("oldcounts"), lpq.quantizer("counted")
    assert [t.dtype for t in measure(x, old, None)] == [torch.float32, torch.int64, torch.int64]
    assert all(map(torch.equal, measure(x, old, None), measure(x, new, None)))
    assert equal_states(parts(old.quantize(x)), parts(new.quantize(x)))


def test_more_elements_than_plugin_interface_1_can_count_are_refused() -> None:
    counted_format.register_old()
    lpq.quantizer("oldcounts").quantize(torch.ones(4096, 4096), col=False)
    with pytest.raises(PluginError, match=r"counts in fp32.*up to 2\^24 elements, and these are 16,781,312.*int64"):
        lpq.quantizer("oldcounts").quantize(torch.ones(4097, 4096))


def test_a_kernel_of_plugin_interface_1_measures_no_counts() -> None:
    counted_format.register()
    counted, cpu = lpq.quantizer("counted"), torch.device("cpu")
    for op, format, version, refused in (
        ("measure", counted, 1, True),
        ("measure", counted, 2, False),
        ("decode", counted, 1, False),
        ("measure", lpq.quantizer("nvfp4"), 1, False),
    ):
        kernel = KernelSpec(op=op, impl="any:any", backend="torch", device="cpu", api_version=version)
        reason = table.why_not(kernel, (format,), cpu)
        assert (reason is not None and "plugin interface 1" in reason) is refused


def test_a_weight_of_two_rounds_is_gathered_in_high_precision() -> None:
    counted_format.register()
    reason = why_not(lpq.quantizer("counted"), 64, 2)
    assert reason == "counted measures in two rounds, and weights are gathered after one"
    assert why_not(lpq.quantizer("counted"), 64, 1) is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("once", "measures 'above' in round 2, and Once has no measure_again"),
        ("kept", "combined by MAX in one round"),
        ("falling", "its state 'low' falls as a statistic rises, and ranks combine their states by MAX"),
    ],
)
def test_what_does_not_fit_together_is_refused(name: str, error: str) -> None:
    counted_format.register()
    with pytest.raises(PluginError, match=error):
        lpq.quantizer(f"counted_{name}").ready()


def test_a_state_that_overflows_is_no_falling_one() -> None:
    """With this margin the state of a large amax is beyond fp32, and so replaced by a lower one."""
    lpq.quantizer("fp8(scaling=delayed, margin=127)").ready()
