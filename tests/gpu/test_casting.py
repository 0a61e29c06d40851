"""The kernels that cast fragments of many masters at once equal the formats, in a fixed number of launches."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from casting import (
    FORMATS,
    ODD,
    SEED,
    SERVED,
    Case,
    as_bytes,
    buffers,
    case,
    cast,
    check,
    gather,
    patterns,
    started,
    values,
)
from quantizers import SIDES
from ranks import spawn
from test_fragments import SPANS
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.casting.batched import Batched
from lpq.distributed.masters import Pieces, cast_master_weights, finish_gather
from lpq.kernels import fragments
from lpq.kernels.cuda import CudaKernel
from lpq.testing.comparing import Poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(40, 130), (33, 7), (1, 5), (128, 64), (160, 48), (5, 1), (17, 256), (130, 260), (300, 516), (256, 1024)]
"""Ragged and whole blocks, some of more than one tile, with rows of whole words and not."""


@pytest.fixture(autouse=True)
def cuda_core() -> None:
    pytest.importorskip("cuda.core")


def _moved(one: Case) -> Case:
    return Case(one.quantizer, one.master.cuda(), one.spans, one.row, one.col, one.dtype)


def _all_batched(cases: Sequence[Case]) -> bool:
    pieces = started(cases, [one.weight() for one in cases], 0)
    return all(isinstance(each, Batched) for each in pieces.casts)


@pytest.mark.parametrize("text", SERVED)
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_gets_the_cast_of_the_whole_master(text: str, seed: int) -> None:
    rng = random.Random(seed)
    ranks, (row, col) = rng.randint(1, 5), SIDES[seed % 3]
    cases = [case(text, ranks, rng, shape=shape, row=row, col=col) for shape in SHAPES]
    moved = [_moved(one) for one in cases]
    assert _all_batched(moved)
    with Poisoned():  # type: ignore[no-untyped-call]
        ranks_of_weights = cast(moved)
    for rank, weights in enumerate(ranks_of_weights):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight.cpu(), one.expected(i), (text, rank, one.spans))


@pytest.mark.parametrize("text", SERVED)
def test_every_kind_of_fragment(text: str) -> None:
    spans = max(SPANS.values(), key=len)
    cases = [Case(lpq.quantizer(text), torch.randn(shape), spans) for shape in ((40, 130), (130, 40), (52, 100))]
    for rank, weights in enumerate(cast([_moved(one) for one in cases])):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight.cpu(), one.expected(i), (text, rank))


@pytest.mark.parametrize("text", SERVED)
def test_every_bit_pattern_is_cast_alike(text: str) -> None:
    """NaNs of any payload, infinities and subnormal numbers, in fragments that cut blocks."""
    spans = [(0, 12345), (12345, 50001), (50001, 65536)]
    cases = [Case(lpq.quantizer(text), master, spans) for master in patterns(256, 256)]
    for rank, weights in enumerate(cast([_moved(one) for one in cases])):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight.cpu(), one.expected(i), (text, rank, i))


def test_a_byte_of_two_ranks_is_complete_on_both() -> None:
    """Before anything is gathered, each rank has every byte with an element of its own."""
    cuts = [0, 1, 2, 5, 5, 100, 131, 132, 133, 297]  # some of these fragments are half a byte
    one = Case(lpq.quantizer("nvfp4"), torch.randn(9, 33), list(pairwise(cuts)), col=False)
    expected = as_bytes(one.expected(0)[0]).view(9, -1)
    for (start, stop), (weight,) in zip(one.spans, cast([_moved(one)], finish=False), strict=True):
        data = as_bytes(buffers(weight)[0].cpu()).view(9, -1)
        for row, col in (divmod(position, 33) for position in range(start, stop)):
            assert data[row, col // 2] == expected[row, col // 2], (start, stop, row, col)


@pytest.mark.parametrize("text", SERVED)
def test_ranks_with_other_devices_are_told_the_same(text: str) -> None:
    cases = [case(text, 3, random.Random(i), shape=shape) for i, shape in enumerate(SHAPES)]
    moved = [_moved(one) for one in cases]
    for rank in range(3):
        here = started(cases, [one.weight() for one in cases], rank).tell()
        there = started(moved, [one.weight() for one in moved], rank).tell()
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("text", SERVED)
def test_the_host_does_not_wait(text: str) -> None:
    cases = [_moved(case(text, 3, random.Random(i), shape=s, odd=(torch.inf, 1e9))) for i, s in enumerate(SHAPES)]
    cast(cases)  # what is compiled or looked up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        cast(cases)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("text", [text for text in FORMATS if "mxfp4" not in text])
def test_a_graph_casts_what_the_masters_hold_at_its_replay(text: str) -> None:
    """The places of the weights are recorded with it: more of them than one launch carries."""
    rng = random.Random(1)
    cases = [_moved(case(text, 1, rng, shape=shape)) for shape in SHAPES * 3]
    quantizer, masters = cases[0].quantizer, [one.master.flatten() for one in cases]
    states = [quantizer.new_state("cuda") or None for _ in cases]
    seed = torch.tensor(SEED, device="cuda")

    def run(weights: list[QuantizedTensor], own: Any, bits: torch.Tensor | int) -> list[QuantizedTensor]:
        finish_gather(cast_master_weights(weights, masters, [0] * len(weights), None, states=own, seed=bits))
        return weights

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what is compiled or looked up once
        run([one.weight() for one in cases], copy.deepcopy(states), seed)
    torch.cuda.current_stream().wait_stream(stream)
    weights, graph = [one.weight() for one in cases], torch.cuda.CUDAGraph()
    poison = [[b.clone() for b in buffers(weight)] for weight in weights]
    remembered = copy.deepcopy(states)
    with torch.cuda.graph(graph, stream=stream):
        run(weights, states, seed)
    for step in range(3):
        for master, one in zip(masters, cases, strict=True):
            master.copy_(values(tuple(one.master.shape), rng).flatten())
        seed.fill_(SEED + 1000 * step)
        for weight, wrong in zip(weights, poison, strict=True):
            for buffer, bad in zip(buffers(weight), wrong, strict=True):
                buffer.copy_(bad)
        graph.replay()
        expected = run([one.weight() for one in cases], remembered, SEED + 1000 * step)  # and takes memory of the host
        for weight, other in zip(weights, expected, strict=True):
            check(weight, buffers(other), (text, step))
        for state, other_state in zip(states, remembered, strict=True):
            for name in state or {}:
                assert torch.equal(as_bytes(state[name]), as_bytes(other_state[name])), (text, step, name)


def _recorded_with_its_reduction(rank: int, text: str) -> None:
    rng = random.Random(7)  # of all ranks
    cases = [_moved(case(text, 2, rng, shape=shape)) for shape in SHAPES]
    quantizer, offsets = cases[0].quantizer, [one.spans[rank][0] for one in cases]
    parts = [one.part(rank).clone() for one in cases]
    states, whole = ([quantizer.new_state("cuda") or None for _ in cases] for _ in range(2))
    weights, graph, stream = [one.weight() for one in cases], torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def run(into: list[QuantizedTensor], own: Any) -> Pieces:
        return cast_master_weights(into, parts, offsets, dist.group.WORLD, states=own, seed=SEED)

    with torch.cuda.stream(stream):  # what is compiled or looked up once
        run([one.weight() for one in cases], copy.deepcopy(states))
    torch.cuda.synchronize()
    # NCCL's own threads ask for its events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        pieces = run(weights, states)
    for step in range(3):
        for part, one in zip(parts, cases, strict=True):
            one.master.copy_(values(tuple(one.master.shape), rng))
            part.copy_(one.part(rank))
        for weight, one in zip(weights, cases, strict=True):
            for buffer, bad in zip(buffers(weight), buffers(one.weight()), strict=True):
                buffer.copy_(bad)
        graph.replay()
        for piece in pieces:
            for source, span in enumerate(cases[piece.weight].spans):
                begin, end = piece.span(*span)
                sent = piece.own.clone() if source == rank else torch.empty_like(piece.buffer[begin:end])
                dist.broadcast(sent.view(torch.uint8), source)
                piece.buffer[begin:end] = sent
        finish_gather(pieces)
        for i, (weight, one, state) in enumerate(zip(weights, cases, whole, strict=True)):
            check(weight, one.expected(i, state), (text, step, i))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("text", ["fp8(scaling=delayed, history=3)", "mxfp8", "hybrid(row=nvfp4(rht=true), col=mxfp8)"])
def test_a_graph_records_the_reduction_between_two_gpus(text: str) -> None:
    spawn(_recorded_with_its_reduction, 2, text, backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("text", ["fp8(scaling=delayed, history=3)", "hybrid(row=fp8(scaling=delayed), col=mxfp8)"])
def test_delayed_scaling_remembers_as_the_cast_of_the_whole_does(text: str) -> None:
    rng, ranks, quantizer = random.Random(5), 3, lpq.quantizer(text)
    states = [[quantizer.new_state("cuda") for _ in range(3)] for _ in range(ranks)]
    whole = [quantizer.new_state() for _ in range(3)]
    for _ in range(4):
        cases = [case(text, ranks, rng, shape=shape) for shape in ((40, 34), (64, 64), (40, 34))]
        expected = [one.expected(i, state) for i, (one, state) in enumerate(zip(cases, whole, strict=True))]
        for rank, weights in enumerate(cast([_moved(one) for one in cases], states=states)):
            for weight, wanted in zip(weights, expected, strict=True):
                check(weight.cpu(), wanted, (text, rank))
        for own in states:
            for state, wanted_state in zip(own, whole, strict=True):
                assert all(torch.equal(as_bytes(state[n].cpu()), as_bytes(t)) for n, t in wanted_state.items())


# ---------------------------------------------------------------------------------------------- how much is launched


IDLE = ("empty", "new_empty", "detach", "is_pinned", "_pin_memory")


class _Operators(TorchDispatchMode):
    """The operators that the device runs: no views, and no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [] if func.is_view or func.overloadpacket.__name__ in IDLE else [str(func)]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    launch = CudaKernel.launch

    def counted(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        found.append(self.name)
        launch(self, device, macros, blocks, *arguments)

    monkeypatch.setattr(CudaKernel, "launch", counted)
    return found


@pytest.mark.parametrize("text", SERVED)
def test_the_number_of_launches_does_not_grow_with_the_number_of_shapes(text: str, launches: list[str]) -> None:
    def launched(count: int) -> tuple[list[str], list[str]]:
        shapes = [(64 + 3 * i, 64 + 4 * i) for i in range(count)]
        cases = [_moved(case(text, 3, random.Random(i), shape=s, odd=ODD[:1])) for i, s in enumerate(shapes)]
        told = [started(cases, [one.weight() for one in cases], rank).tell() for rank in range(3)]
        heard, weights = torch.stack(told).amax(0), [one.weight() for one in cases]
        launches.clear()
        fragments._remembered.cache_clear()
        with torch.no_grad(), _Operators() as mode:
            pieces = started(cases, weights, 1)
            pieces.tell()
            pieces.encode(heard)
            finish_gather(pieces)
        return list(launches), mode.seen

    few, many = launched(2), launched(20)
    assert few == many
    assert len(few[0]) + len(few[1]) < 40, few


def test_some_weights_can_be_finished_before_the_others() -> None:
    cases = [case("nvfp4(block=16x16)", 2, random.Random(i), shape=(32, 16 * i + 16)) for i in range(3)]
    moved = [_moved(one) for one in cases]
    made = [started(moved, [one.weight() for one in moved], rank) for rank in range(2)]
    heard = torch.stack([pieces.tell() for pieces in made]).amax(0)
    for pieces in made:
        pieces.encode(heard)
    gather(moved, made)
    for pieces in made:
        finish_gather(pieces, only=[1])
        finish_gather(pieces, only=[])
        items = [item for each in pieces.casts for item in each.items]
        for i, item in enumerate(items):
            check(item.weight.cpu(), cases[i].expected(i), i)
