"""Casting shards of fp32 master weights gives every rank the bytes of casting the whole master, for any format."""

from __future__ import annotations

import random
import re
from typing import Any

import odd_formats
import pytest
import torch
import torch.distributed as dist
import value_formats
import whole_formats
from casting import FORMATS, SEED, Case, buffers, case, check, gather, owned, register_example
from quantizers import SIDES
from ranks import on_ranks
from support.comparing import as_bytes
from torch import nn

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import cast_master_weights, finish_gather, masters
from lpq.observe import collectives

RANKS = 3
OTHERS = [*odd_formats.NAMES, *whole_formats.NAMES, whole_formats.STRIDED, *value_formats.NAMES]
"""Formats that declare little, or that have codes of several elements."""


# ---------------------------------------------------------------------------------------------- the bytes


def _cast(
    rank: int, cases: list[Case], group: Any = None, weights: list[QuantizedTensor] | None = None, **options: Any
) -> list[QuantizedTensor]:
    """This rank's weights, once they are finished."""
    group = group or dist.group.WORLD
    place = dist.get_rank(group)
    weights = weights or [one.weight() for one in cases]
    parts = [part if len(part := one.part(place)) or rank else None for one in cases]
    pieces = cast_master_weights(weights, parts, [one.spans[place][0] for one in cases], group, seed=SEED, **options)
    gather(pieces, [one.spans for one in cases], group)
    with collectives() as seen:
        finish_gather(pieces)
    assert not seen
    return weights


def _check_all(rank: int, cases: list[Case]) -> None:
    for i, (weight, one) in enumerate(zip(_cast(rank, cases), cases, strict=True)):
        check(weight, one.expected(i), (rank, one.quantizer, one.spans))


@on_ranks(RANKS)
def test_of_third_parties(rank: int) -> None:
    for formats in (odd_formats, whole_formats, value_formats):
        formats.register()
    rng = random.Random(0)
    cases = [
        case(text, RANKS, rng, shape=(37, 70), odd=(0.0, 1e6), row=row, col=col)
        for text in OTHERS
        for row, col in SIDES
    ]
    _check_all(rank, cases)


@on_ranks(RANKS)
def test_strided(rank: int) -> None:
    """Operands that lie in memory otherwise are written, too."""
    cases = [case(text, RANKS, random.Random(0), shape=(32, 64)) for text in ("mxfp8", "fp8(scaling=row)")]
    weights = [one.weight() for one in cases]
    if rank == 0:
        weights = [weight.map(lambda b: b.t().contiguous().t() if b.dim() == 2 else b) for weight in weights]
        assert not buffers(weights[0])[0].is_contiguous()
    for i, (weight, one) in enumerate(zip(_cast(rank, cases, weights=weights), cases, strict=True)):
        check(weight, one.expected(i), (rank, one.quantizer))


@on_ranks(RANKS)
def test_remembered(rank: int) -> None:
    """Delayed scaling remembers as the cast of the whole does."""
    texts = [
        "fp8(scaling=delayed, history=3)",
        "hybrid(row=fp8(scaling=delayed), col=mxfp8)",
        "hybrid(row=fp8(scaling=delayed), col=nvfp4(rht=true))",
        "hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row)",
    ]
    rng, quantizers = random.Random(5), [lpq.quantizer(text) for text in texts]
    states, whole = ([quantizer.new_state() for quantizer in quantizers] for _ in range(2))
    for step in range(5):
        cases = [case(text, RANKS, rng, shape=(40, 34)) for text in texts]
        made = _cast(rank, cases, states=states)
        for i, (one, weight, state) in enumerate(zip(cases, made, whole, strict=True)):
            check(weight, one.expected(i, state), (texts[i], rank, step))
            assert all(torch.equal(as_bytes(states[i][name]), as_bytes(t)) for name, t in state.items()), texts[i]


@on_ranks(RANKS)
def test_without_the_reduction(rank: int) -> None:
    """The negative control: ranks then disagree about scales."""
    master = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    master[20, 3] = 100.0
    one = Case(lpq.quantizer("fp8"), master, [(0, 511), (511, 1000), (1000, 1024)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masters, "reduce_max", lambda values, group: list(values))
        (weight,) = _cast(rank, [one])
    scales: list[Any] = [None] * RANKS
    dist.all_gather_object(scales, buffers(weight)[1])
    assert len({float(scale) for scale in scales}) == RANKS


@on_ranks(RANKS)
def test_what_travels(rank: int) -> None:
    """Statistics, if each element has a code of its own, and else elements."""

    def sent(text: str, **sides: bool) -> list[int]:
        one = case(text, RANKS, random.Random(0), shape=(256, 512), **sides)
        with collectives() as seen:
            cast_master_weights([one.weight()], [one.part(rank)], [one.spans[rank][0]], dist.group.WORLD)
        return [c.bytes for c in seen if c.kind == "all_reduce"]

    assert sent("identity") == []
    assert sent("fp8") == [4]
    assert sent("mxfp8", col=False) == [4 * 256 * 16]
    assert sent("hybrid(row=fp8, col=mxfp8)") == [4 * (1 + 512 * 8)]
    for elements in ("nvfp4", "hybrid(row=mxfp8, col=nvfp4(rht=true))", "hybrid(row=mxfp8, col=fp8, col_source=row)"):
        assert sent(elements) == [4 * 256 * 512]


@on_ranks(RANKS)
def test_in_a_part_of_the_ranks(rank: int) -> None:
    pair = dist.new_group([0, 2])
    one = case("mxfp8", 2, random.Random(9), shape=(32, 48))
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            cast_master_weights([one.weight()], [None], [0], pair)
        return
    (weight,) = _cast(rank, [one], pair)
    check(weight, one.expected(0), rank)


@on_ranks(RANKS)
def test_parts_that_do_not_add_up(rank: int) -> None:
    for spans, words in (
        ([(0, 30), (31, 64), (0, 0)], "no rank of the group owns elements [30, 31)"),
        ([(1, 64), (0, 0), (0, 0)], "no rank of the group owns elements [0, 1)"),
        ([(0, 0), (0, 63), (0, 0)], "no rank of the group owns elements [63, 64)"),
        ([(0, 0), (0, 0), (0, 0)], "no rank of the group owns elements [0, 64)"),
        ([(0, 32), (31, 63), (0, 0)], "more than one rank of the group owns elements [31, 32)"),  # the counts add up
        ([(0, 64), (0, 0), (10, 20)], "more than one rank of the group owns elements [10, 20)"),
        ([(0, 64), (0, 64), (0, 64)], "more than one rank of the group owns elements [0, 64)"),
    ):
        one = Case(lpq.quantizer("fp8"), torch.randn(8, 8), spans)
        whole = rf"{re.escape(words)} of masters\[0\], whose weight \[8, 8\] has 64: together they must own each"
        with pytest.raises(ValueError, match=whole):
            _cast(rank, [one])


@pytest.mark.parametrize("seed", range(3))
@on_ranks(RANKS)
def test_every_rank_gets_the_cast_of_the_whole_master(rank: int, seed: int) -> None:
    """A third of the formats with each seed, in one cast; of one weight all is on one rank."""
    register_example()
    rng = random.Random(seed)
    cases = [
        case(text, RANKS, rng, row=row, col=col, dtype=rng.choice((torch.float32, torch.bfloat16)))
        for text in FORMATS[seed::3]
        for row, col in SIDES
        for _ in range(2)
    ]
    if seed == 1:  # one rank owns nothing at all
        cases = [Case(c.quantizer, c.master, [(0, 0), *owned(c.master.numel(), 2, rng)]) for c in cases]
    cases.append(Case(lpq.quantizer("fp8"), torch.randn(8, 8), [(64, 64), (0, 64), (0, 0)]))
    cases += [Case(lpq.quantizer("nvfp4"), torch.zeros(shape), [(0, 0)] * RANKS) for shape in ((0, 16), (16, 0))]
    _check_all(rank, cases)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_ranks(2)
def test_real_gpus(rank: int) -> None:
    register_example()
    torch.cuda.set_device(rank)
    group = dist.new_group([0, 1], backend="nccl")
    rng = random.Random(0)
    cases = [case(text, 2, rng, odd=(torch.inf, 1e9)) for text in FORMATS for _ in range(2)]
    moved = [Case(one.quantizer, one.master.cuda(), one.spans) for one in cases]
    for i, (weight, one) in enumerate(zip(_cast(rank, moved, group), cases, strict=True)):
        check(weight.cpu(), one.expected(i), (rank, one.quantizer, one.spans))


# ---------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("text", FORMATS[:-1])
def test_one_process_casts_all(text: str) -> None:
    one = case(text, 1, random.Random(1), shape=(64, 48))
    weight = one.weight()
    pieces = cast_master_weights([weight], [one.part(0)], [0], None, seed=SEED)
    assert not pieces
    finish_gather(pieces)
    check(weight, one.expected(0), text)
    if "stochastic" not in text:
        written = one.weight()
        written.copy_(one.master)
        check(written, one.expected(0), text)


@on_ranks(RANKS)
def test_some_weights_can_be_finished_before_the_others(rank: int) -> None:
    cases = [case("fp8", RANKS, random.Random(i), shape=(32, 32)) for i in range(3)]
    weights = [one.weight() for one in cases]
    parts, offsets = [one.part(rank) for one in cases], [one.spans[rank][0] for one in cases]
    pieces = cast_master_weights(weights, parts, offsets, dist.group.WORLD)
    gather(pieces, [one.spans for one in cases], dist.group.WORLD)
    untouched = as_bytes(buffers(weights[0])[2]).clone()
    finish_gather(pieces, only=[1])
    check(weights[1], cases[1].expected(1), 1)
    assert torch.equal(as_bytes(buffers(weights[0])[2]), untouched)
    finish_gather(pieces)
    check(weights[0], cases[0].expected(0), 0)


def test_a_parameter_is_written_in_place_and_autograd_is_told() -> None:
    one = case("fp8", 1, random.Random(0), shape=(16, 32))
    parameter = nn.Parameter(one.weight())
    version, where = parameter._version, [b.data_ptr() for b in buffers(parameter)]
    with torch.autocast("cpu", torch.bfloat16):
        finish_gather(cast_master_weights([parameter], [nn.Parameter(one.part(0))], [0], None))
    check(parameter, one.expected(0), "parameter")
    assert parameter._version > version
    assert [b.data_ptr() for b in buffers(parameter)] == where


# ---------------------------------------------------------------------------------------------- what is refused


def _weight(text: str = "mxfp8", *shape: int) -> QuantizedTensor:
    tensor: QuantizedTensor = lpq.quantizer(text).quantize(torch.zeros(shape or (32, 64)))
    return tensor


def _shard() -> QuantizedTensor:
    weight = _weight("fp8")
    weight.amax_group = "unattached"
    return weight


def _stack() -> QuantizedTensor:
    stack: QuantizedTensor = lpq.quantizer("fp8").quantize(torch.zeros(2, 32, 32), stack=True)
    return stack


FULL = torch.zeros(2048)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([_weight()], [FULL, FULL], [0]), ValueError, "1 weights, 2 masters, 1 offsets: pass one of each"),
        (([_weight(), torch.zeros(32, 64)], [FULL] * 2, [0, 0]), TypeError, r"weights\[1\] is a Tensor"),
        (([_weight()], [FULL.double()], [0]), TypeError, r"masters\[0\] is torch.float64 \[2048\]: pass .* fp32"),
        (([_weight()], [FULL.view(32, 64)], [0]), TypeError, r"masters\[0\] is torch.float32 \[32, 64\]: .* 1-D"),
        (([_weight()], [FULL], [1]), ValueError, r"masters\[0\] are elements \[1, 2049\) of a weight \[32, 64\]"),
        (([_weight()], [FULL], [-1]), ValueError, r"elements \[-1, 2047\).*offsets count from the first element"),
        (([_weight()], [FULL[5:]], [5]), ValueError, r"no rank .* owns elements \[0, 5\) of .* pass group="),
        (([_weight()], [None], [0]), ValueError, r"no rank .* owns elements \[0, 2048\) of masters\[0\].* pass group="),
        (([_weight("fp8")[:16]], [FULL[:1024]], [0]), ValueError, r"weights\[0\] is a view .* of a tensor \[32, 64\]"),
        (([_shard()], [FULL], [0]), ValueError, r"weights\[0\] is a shard of a weight"),
        (([_stack()], [FULL], [0]), ValueError, r"weights\[0\] is a stack of 2 matrices"),
        (([_weight("nvfp4(stochastic=true)")], [FULL], [0]), ValueError, "pass seed="),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cast_master_weights(*arguments, None)


def test_states_are_checked() -> None:
    delayed = _weight("fp8(scaling=delayed)")
    with pytest.raises(ValueError, match=r"states\[0\] has no amax_history"):
        cast_master_weights([delayed], [FULL], [0], None, states=[{"amax": torch.zeros(())}])
