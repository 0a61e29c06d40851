"""The clocks of the benchmarks alone: one kernel's calls, steps of training, and the speed of a copy.

``lpq.bench.timing`` has the clock for steps that take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lpq.bench.timing import Step, Timing, between, event

WARM = 3
"""Steps of training before the clock starts."""


def seconds(run: Callable[[int], object], busy: Step, repeats: int = 12, batch: int = 8) -> float:
    """The median time of a call on the GPU. ``busy`` keeps the GPU occupied while the calls of a batch are queued.

    ``run`` is told the number of the call, so that it can take another tensor than the one before, which is in a cache.
    """
    for i in range(3):
        run(i)
    times = []
    for i in range(repeats):
        start, end = event(), event()
        for _ in range(6):
            busy()
        start.record()
        for j in range(batch):
            run(i + j)
        end.record()
        end.synchronize()
        times.append(between(start, end) / batch)
    return statistics.median(times)


def one_after_another(step: Callable[[], Tensor], steps: int, device: torch.device) -> tuple[Timing, float]:
    """The seconds from the end of one step of training to the end of the next, without stopping between them, and the
    last loss."""
    losses = [step() for _ in range(WARM)]
    if device.type != "cuda":
        samples = []
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(step())
            samples.append(time.perf_counter() - start)
        return Timing.of(samples), float(losses[-1])
    marks = [event() for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        losses.append(step())
        mark.record()
    torch.cuda.synchronize()
    return Timing.of([between(a, b) for a, b in pairwise(marks)]), float(losses[-1])


def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step, recorded in a CUDA graph once it is warm. Other threads may call CUDA meanwhile, as NCCL's do."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def launching(step: Step, steps: int = 8) -> float:
    """The median of the seconds that the host takes to launch a step on a GPU that has nothing else to do."""
    samples = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def copy_speed(device: torch.device, rows: int = 16384, cols: int = 8192) -> float:
    """Bytes a second, read and written, of copying bf16 tensors that no cache holds."""
    sources = [torch.randn(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(2)]
    targets = [torch.empty_like(source) for source in sources]

    def copy(i: int = 0) -> object:
        return targets[i % 2].copy_(sources[i % 2])

    return 2 * sources[0].nbytes / seconds(copy, copy, repeats=30)
