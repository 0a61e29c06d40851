"""Casting shards of fp32 master weights gives every rank the bytes of casting the whole master, for any format."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import odd_formats
import pytest
import torch
import torch.distributed as dist
import value_formats
import whole_formats
from casting import (
    EXAMPLE,
    FORMATS,
    SEED,
    Case,
    agreed,
    as_bytes,
    buffers,
    case,
    cast,
    check,
    check_all,
    gather,
    owned,
    register_example,
    shares,
    started,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizers import SIDES
from ranks import spawn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from lpq import registry
from lpq.core import QuantizedTensor
from lpq.distributed.casting.agreement import DIGIT
from lpq.distributed.casting.agreement import whole as add_up
from lpq.distributed.casting.kinds import Kind, in_fragments
from lpq.distributed.casting.reference import Reference
from lpq.distributed.casting.stacks import run_of
from lpq.distributed.masters import Pieces, cast_master_weights, finish_gather
from lpq.operations.vmapped import vmapped

some = settings(max_examples=settings().max_examples // 4, database=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    odd_formats.register()
    whole_formats.register()
    value_formats.register()
    register_example()
    yield
    sys.path.remove(str(EXAMPLE))
    registry.refresh()


# ---------------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("text", FORMATS)
@some
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from(SIDES))
def test_every_rank_gets_the_cast_of_the_whole_master(
    text: str, rng: random.Random, ranks: int, sides: tuple[bool, bool]
) -> None:
    shape = rng.choice([None, (40, 130)])  # weights of one shape are cast together
    dtype = rng.choice((torch.float32, torch.bfloat16))
    options: dict[str, Any] = {"shape": shape, "row": sides[0], "col": sides[1], "dtype": dtype}
    cases = [case(text, ranks, rng, **options) for _ in range(3)]
    check_all(cast(cases), cases, text)


@pytest.mark.parametrize(
    "text", [*odd_formats.NAMES, *whole_formats.NAMES, whole_formats.STRIDED, *value_formats.NAMES]
)
@some
@given(st.randoms(use_true_random=False), st.integers(2, 5), st.sampled_from(SIDES))
def test_formats_that_declare_little(text: str, rng: random.Random, ranks: int, sides: tuple[bool, bool]) -> None:
    cases = [case(text, ranks, rng, shape=s, odd=(0.0, 1e6), row=sides[0], col=sides[1]) for s in [(37, 70)] * 2]
    check_all(cast(cases), cases, text)


@pytest.mark.parametrize("text", [text for text in FORMATS if "stochastic" not in text])
def test_that_is_what_writing_the_master_to_the_weight_gives(text: str) -> None:
    one = case(text, 1, random.Random(1), shape=(64, 48))
    written = one.weight()
    written.copy_(one.master)
    check(written, one.expected(0), text)


@pytest.mark.parametrize("text", ["fp8", "nvfp4", "nvfp4(block=16x16)"])
def test_without_the_reduction_ranks_disagree(text: str) -> None:
    master = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    master[20, 3] = 100.0
    one = Case(lpq.quantizer(text), master, [(0, 511), (511, 1024)], col=False)
    scales = [buffers(weights[0])[-1] for weights in cast([one], reduce=False)]
    assert not torch.equal(as_bytes(scales[0]), as_bytes(scales[1]))


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "odd_zero"])
def test_a_byte_of_two_ranks_is_complete_on_both(text: str) -> None:
    """Before anything is gathered, each rank has every byte with an element of its own."""
    master = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    cuts = [0, 1, 2, 5, 5, 100, 131, 132, 133, 297]  # some of these fragments are half a byte
    one = Case(lpq.quantizer(text), master, list(pairwise(cuts)), col=False)
    expected = as_bytes(one.expected(0)[0]).view(9, -1)
    for (start, stop), (weight,) in zip(one.spans, cast([one], finish=False), strict=True):
        data = as_bytes(buffers(weight)[0]).view(9, -1)
        for row, col in (divmod(position, 33) for position in range(start, stop)):
            assert data[row, col // 2] == expected[row, col // 2], (start, stop, row, col)


def test_scales_are_complete_before_anything_is_gathered() -> None:
    for text in ("fp8", "mxfp8", "nvfp4", "hybrid(row=mxfp8, col=nvfp4)"):
        one = case(text, 4, random.Random(2), shape=(64, 96))
        for (weight,) in cast([one], finish=False):
            for (direction, operand), (_, whole) in zip(
                weight.operands, one.quantizer.quantize(one.master).operands, strict=True
            ):
                if direction == "row" or text.startswith("hybrid"):
                    for name, buffer in list(operand.buffers().items())[1:]:
                        assert torch.equal(as_bytes(buffer), as_bytes(whole.buffers()[name])), (text, direction, name)


def test_many_kinds_at_once_and_weights_without_elements() -> None:
    rng = random.Random(3)
    cases = [case(text, 3, rng) for text in FORMATS for _ in range(2)]
    cases += [Case(lpq.quantizer("nvfp4"), torch.zeros(shape), [(0, 0)] * 3) for shape in ((0, 16), (16, 0))]
    check_all(cast(cases), cases, "all at once")


def test_batches_may_be_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a cast takes is bounded, and the bytes do not depend on how."""
    monkeypatch.setattr("lpq.distributed.casting.reference.MOST", 200)
    for text in (
        "fp8",
        "nvfp4",
        "hybrid(row=mxfp8, col=nvfp4(rht=true))",
        "hybrid(row=nvfp4, col=mxfp8, col_source=row)",
    ):
        cases = [case(text, 3, random.Random(i), shape=(40, 34)) for i in range(4)]
        check_all(cast(cases), cases, text)


# ---------------------------------------------------------------------------------------------- what is found out


def test_what_is_known_of_formats() -> None:
    def known(text: str) -> tuple[tuple[int, ...], bool, bool]:
        """Declared: the buffers that depend on elements, and whether fragments do. Tried: whether many run at once."""
        quantizer = lpq.quantizer(text)
        kind, side = Kind(quantizer, True, True, 8, 8, torch.float32, False), quantizer.side("col")
        return tuple(kind.coded("col", side)), in_fragments(side), run_of(kind, 2) is vmapped

    for text in FORMATS:
        side = lpq.quantizer(text).side("col")
        assert known(side.text) == ((0,), side.rotation is None, True), text
    assert known("odd_own") == ((0, 1), False, True)
    assert known("odd_levels") == ((0,), True, True)
    assert known("odd_python") == ((0,), True, False)
    assert known("odd_mixed") == ((0, 1), False, True)
    assert known("nvfp4(search=four_over_six)") == ((0, 1), True, True)


def test_only_elements_that_share_a_code_are_told() -> None:
    """Rotated weights are told element by element, others by their statistics and what a boundary cuts."""

    def words(text: str, **sides: bool) -> int:
        one = case(text, 2, random.Random(0), shape=(256, 512), **sides)
        told = len(started([one], [one.weight()], 0).tell())
        return told - agreed(2) - shares(2)  # beside which cast it is, and what each rank owns

    assert words("identity") == 0
    assert words("fp8") == 1
    assert words("mxfp8", col=False) == 256 * 16
    assert words("nvfp4", col=False) == 1 + 256 * 32 + 2 * (4 + 2)
    assert words("nvfp4(block=16x16)") == 1 + 16 * 32 + 2 * (4 + 2)
    assert words("nvfp4") == 2 * (1 + 256 * 32) + 2 * (4 + 2 * 512)
    assert words("hybrid(row=mxfp8, col=nvfp4(rht=true))") == 256 * 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("text", FORMATS)
def test_a_gpu_casts_as_the_cpu_does_and_the_host_does_not_wait(text: str) -> None:
    cases = [case(text, 3, random.Random(i), shape=(96, 160), odd=(torch.inf, 1e9)) for i in range(4)]
    moved = [Case(one.quantizer, one.master.cuda(), one.spans) for one in cases]
    cast(moved)  # what is looked up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        ranks = cast(moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for weights in ranks:
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight.cpu(), one.expected(i), (text, one.spans))


# ---------------------------------------------------------------------------------------------- what is remembered


@pytest.mark.parametrize(
    "text",
    [
        "fp8(scaling=delayed, history=3)",
        "hybrid(row=fp8(scaling=delayed), col=mxfp8)",
        "hybrid(row=fp8(scaling=delayed), col=nvfp4(rht=true))",
    ],
)
def test_delayed_scaling_remembers_as_the_cast_of_the_whole_does(text: str) -> None:
    rng, ranks, quantizer = random.Random(5), 3, lpq.quantizer(text)
    states = [[quantizer.new_state() for _ in range(2)] for _ in range(ranks)]
    whole = [quantizer.new_state() for _ in range(2)]
    for _ in range(5):
        cases = [case(text, ranks, rng, shape=(40, 34)) for _ in range(2)]
        expected = [one.expected(i, state) for i, (one, state) in enumerate(zip(cases, whole, strict=True))]
        for rank, weights in enumerate(cast(cases, states=states)):
            for weight, wanted in zip(weights, expected, strict=True):
                check(weight, wanted, (text, rank))
        for own in states:
            for state, wanted_state in zip(own, whole, strict=True):
                assert state.keys() == wanted_state.keys()
                assert all(torch.equal(as_bytes(state[n]), as_bytes(t)) for n, t in wanted_state.items())


# ---------------------------------------------------------------------------------------------- what is written to


def test_some_weights_can_be_finished_before_the_others() -> None:
    cases = [case("nvfp4(block=16x16)", 1, random.Random(i), shape=(32, 32)) for i in range(3)]
    weights = [one.weight() for one in cases]
    pieces = cast_master_weights(weights, [one.part(0) for one in cases], [0] * 3, None)
    untouched = as_bytes(buffers(weights[0])[3]).clone()
    finish_gather(pieces, only=[1])
    check(weights[1], cases[1].expected(1), 1)
    assert torch.equal(as_bytes(buffers(weights[0])[3]), untouched)
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


def test_a_row_operand_that_is_strided_is_written_when_it_is_finished() -> None:
    one = case("mxfp8", 2, random.Random(0), shape=(32, 64))
    strided = one.weight().map(lambda b: b.t().contiguous().t())
    assert not buffers(strided)[0].is_contiguous()
    weights = [strided, one.weight()]
    made = [started([one], [weights[rank]], rank) for rank in range(2)]
    heard = torch.stack([pieces.tell() for pieces in made]).amax(0)
    for pieces in made:
        pieces.encode(heard)
    gather([one], made)
    check(strided, one.expected(0), "strided")


# ---------------------------------------------------------------------------------------------- what is refused


def _weight(text: str = "mxfp8", *shape: int) -> QuantizedTensor:
    tensor: QuantizedTensor = lpq.quantizer(text).quantize(torch.zeros(shape or (32, 64)))
    return tensor


def _shard() -> QuantizedTensor:
    weight = _weight("fp8")
    weight.amax_group = "unattached"
    return weight


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
        (([_weight()], [FULL[5:]], [5]), ValueError, r"elements \[5, 2048\) of 2048, .*: pass group="),
        (([_weight()], [None], [0]), ValueError, r"elements \[0, 0\) of 2048, .*: pass group="),
        (([_weight("fp8")[:16]], [FULL[:1024]], [0]), ValueError, r"weights\[0\] is a view .* of a tensor \[32, 64\]"),
        (([_shard()], [FULL], [0]), ValueError, r"weights\[0\] is a shard of a weight"),
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
    late = lpq.quantizer("hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row)")
    with pytest.raises(ValueError, match=r"states\[0\].* are known after the gather only"):
        cast_master_weights([late.quantize(torch.zeros(32, 64))], [FULL], [0], None, states=[late.new_state()])


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 30), (31, 64)], "no rank of the group owns elements [30, 31)"),
        ([(1, 64), (0, 0)], "no rank of the group owns elements [0, 1)"),
        ([(0, 0), (0, 63)], "no rank of the group owns elements [63, 64)"),
        ([(0, 0), (0, 0)], "no rank of the group owns elements [0, 64)"),
        ([(0, 32), (31, 63)], "more than one rank of the group owns elements [31, 32)"),  # the counts add up
        ([(32, 64), (32, 64)], "no rank of the group owns elements [0, 32)"),
        ([(0, 64), (0, 0), (10, 20)], "more than one rank of the group owns elements [10, 20)"),
        ([(0, 64), (0, 64)], "more than one rank of the group owns elements [0, 64)"),
    ],
)
def test_fragments_that_do_not_add_up_are_refused_by_all_ranks(spans: list[tuple[int, int]], words: str) -> None:
    one = Case(lpq.quantizer("fp8"), torch.randn(8, 8), spans)
    whole = rf"{re.escape(words)} of masters\[0\], whose weight \[8, 8\] has 64: together they must own each"
    with pytest.raises(ValueError, match=whole):
        cast([one])


@settings(database=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), min_size=1, max_size=4), st.booleans())
def test_parts_are_a_whole_if_each_element_is_owned_once(parts: list[list[int]], many: bool) -> None:
    spans = [(0, 0) if start == end else (start, end) for start, end in parts]
    scale = 2**34 + 1 if many else 1  # places above 32 bits
    told = [[divmod(place * scale, DIGIT) for place in span] for span in [*spans, (6, 0)]]
    once = sorted(i for start, end in spans for i in range(start, end)) == list(range(6))
    assert add_up(torch.tensor([told], dtype=torch.int32)).tolist() == [once]


# ---------------------------------------------------------------------------------------------- real ranks


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func.__name__] if func.namespace in ("c10d", "_c10d_functional") else []
        return func(*args, **(kwargs or {}))


def _gathered(pieces: Pieces, spans: list[list[tuple[int, int]]], rank: int, group: Any, device: str = "cpu") -> None:
    """All pieces of all ranks, with one all-gather of bytes of the caller's own."""
    mine = torch.cat([as_bytes(piece.own) for piece in pieces] or [torch.empty(0, dtype=torch.uint8, device=device)])
    places = [[piece.span(*spans[piece.weight][r]) for piece in pieces] for r in range(dist.get_world_size(group))]
    sizes = [
        sum((stop - start) * piece.buffer.itemsize for piece, (start, stop) in zip(pieces, each, strict=True))
        for each in places
    ]
    assert sizes[rank] == len(mine)
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    got = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(got, padded, group=group)
    for each, sent in zip(places, got, strict=True):
        at = 0
        for piece, (start, stop) in zip(pieces, each, strict=True):
            size = (stop - start) * piece.buffer.itemsize
            as_bytes(piece.buffer[start:stop]).copy_(sent[at : at + size])
            at += size


def _on_real_ranks(rank: int, seed: int) -> None:
    """A third of the formats with each seed."""
    register_example()
    world = dist.group.WORLD
    assert world is not None
    rng = random.Random(seed)
    cases = [case(text, 3, rng, row=row, col=col) for text in FORMATS[seed::3] for row, col in SIDES]
    if seed == 1:  # one rank owns nothing at all
        cases = [Case(c.quantizer, c.master, [(0, 0), *owned(c.master.numel(), 2, rng)]) for c in cases]
    if seed == 2:
        cases = [one for one in cases for _ in range(3)]
    weights = [one.weight() for one in cases]
    parts: list[Tensor | None] = [one.part(rank) for one in cases]
    parts = [part if part is not None and (len(part) or seed) else None for part in parts]
    with _Collectives() as mode:
        pieces = cast_master_weights(weights, parts, [one.spans[rank][0] for one in cases], world, seed=SEED)
    assert mode.seen == ["allreduce_.default"], mode.seen
    _gathered(pieces, [list(one.spans) for one in cases], rank, world)
    with _Collectives() as mode:
        finish_gather(pieces)
    assert mode.seen == []
    for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
        check(weight, one.expected(i), (seed, rank, one.quantizer, one.spans))


def _owned_twice(rank: int) -> None:
    with pytest.raises(ValueError, match=r"more than one rank of the group owns elements \[0, 2048\)"):
        cast_master_weights([_weight()], [FULL], [0], dist.group.WORLD)


def _in_a_part_of_the_ranks(rank: int) -> None:
    pair = dist.new_group([0, 2])
    one = case("nvfp4", 2, random.Random(9), shape=(32, 48))
    weight = one.weight()
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            cast_master_weights([weight], [None], [0], pair)
        return
    place = dist.get_rank(pair)
    pieces = cast_master_weights([weight], [one.part(place)], [one.spans[place][0]], pair)
    _gathered(pieces, [list(one.spans)], place, pair)
    finish_gather(pieces)
    check(weight, one.expected(0), rank)


@pytest.mark.parametrize("seed", range(3))
def test_real_ranks(seed: int) -> None:
    spawn(_on_real_ranks, 3, seed)


@pytest.mark.parametrize("check", [_in_a_part_of_the_ranks, _owned_twice])
def test_a_part_of_the_ranks(check: Any) -> None:
    spawn(check, 3)


def _on_gpus(rank: int) -> None:
    register_example()
    torch.cuda.set_device(rank)
    group = dist.new_group([0, 1], backend="nccl")
    rng = random.Random(0)
    cases = [case(text, 2, rng, odd=(torch.inf, 1e9)) for text in FORMATS for _ in range(2)]
    moved = [Case(one.quantizer, one.master.cuda(), one.spans) for one in cases]
    weights, offsets = [one.weight() for one in moved], [one.spans[rank][0] for one in moved]
    pieces = cast_master_weights(weights, [one.part(rank) for one in moved], offsets, group, seed=SEED)
    _gathered(pieces, [list(one.spans) for one in moved], rank, group, "cuda")
    finish_gather(pieces)
    for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
        check(weight.cpu(), one.expected(i), (rank, one.quantizer, one.spans))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_real_gpus() -> None:
    spawn(_on_gpus, 2)


def test_one_rank_of_a_group_casts_alone() -> None:
    """A group of one, or none, has nothing to reduce and nothing to gather."""
    one = case("nvfp4", 1, random.Random(0))
    weight = one.weight()
    pieces = cast_master_weights([weight], [one.part(0)], [0], None)
    assert len(pieces) == 0
    assert all(isinstance(each, Reference) for each in pieces.casts)
    finish_gather(pieces)
    check(weight, one.expected(0), "alone")
