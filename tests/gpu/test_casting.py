"""Master weights that are cast on a GPU: the bytes of the CPU, without waiting, and in a CUDA graph."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from casting import FORMATS, SEED, SHAPES, Case, buffers, case, check, gather, values
from ranks import spawn
from support.comparing import as_bytes

from lpq.core import QuantizedTensor
from lpq.distributed import Pieces, cast_master_weights, finish_gather

BUILT_IN = [text for text in FORMATS if text != "int4"]


@pytest.fixture(autouse=True)
def cuda_core() -> None:
    pytest.importorskip("cuda.core")


def _moved(one: Case) -> Case:
    return Case(one.quantizer, one.master.cuda(), one.spans, one.row, one.col, one.dtype)


@pytest.mark.parametrize("text", BUILT_IN)
def test_one_process_casts_as_on_the_cpu_and_the_host_does_not_wait(text: str) -> None:
    cases = [case(text, 1, random.Random(i), shape=shape, odd=(torch.inf, 1e9)) for i, shape in enumerate(SHAPES)]
    moved = [_moved(one) for one in cases]

    def run() -> list[QuantizedTensor]:
        weights = [one.weight() for one in moved]
        finish_gather(cast_master_weights(weights, [one.part(0) for one in moved], [0] * len(moved), None, seed=SEED))
        return weights

    run()  # what is compiled or looked up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
        check(weight.cpu(), one.expected(i), text)


@pytest.mark.parametrize("text", BUILT_IN)
def test_a_graph_casts_what_the_masters_hold_at_its_replay(text: str) -> None:
    rng = random.Random(1)
    cases = [_moved(case(text, 1, rng, shape=shape)) for shape in SHAPES]
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
        expected = run([one.weight() for one in cases], remembered, SEED + 1000 * step)
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
        gather(pieces, [one.spans for one in cases], dist.group.WORLD)
        finish_gather(pieces)
        for i, (weight, one, state) in enumerate(zip(weights, cases, whole, strict=True)):
            check(weight, one.expected(i, state), (text, step, i))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("text", ["fp8(scaling=delayed, history=3)", "mxfp8", "hybrid(row=nvfp4(rht=true), col=mxfp8)"])
def test_a_graph_records_the_reduction_between_two_gpus(text: str) -> None:
    spawn(_recorded_with_its_reduction, 2, text, backend="cpu:gloo,cuda:nccl")
