"""Where a step's time goes: on the host by function, on the GPU by kernel and by gap between two of them."""

from __future__ import annotations

import cProfile
import io
import json
import pstats
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import compile_afresh
from lpq.bench.contenders import Contender
from lpq.bench.contenders import in_words as failure_in_words
from lpq.bench.layers import LayerSize, inputs, layer_of, step
from lpq.bench.timing import Step

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = {
    "grouped products": ("grouped",),
    "products": ("gemm", "nvjet", "xmma", "cutlass", "cublas"),
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn"),
    "AdamW": ("adam", "multi_tensor"),
    "rotary positions": ("rope",),
    "loss": ("softmax", "nll", "cross_entropy"),
    "encoding and activations": ("produce", "quantize", "amax", "pair", "zero", "scale", "remember", "history"),
    "norms": ("norm",),
    "additions": ("functor_add",),
    "other compiled code": ("triton_",),
    "copies": ("memcpy", "memset", "copy", "gather", "index", "scatter", "cat"),
}
"""Parts of the names of kernels, by what they do in a step of training: the first that fits."""


def show(everyone: Iterable[Contender], shape: LayerSize, device: torch.device, on_host: bool) -> None:
    """Print where the time of each contender's step goes. Compiled code runs few functions that have names."""
    for contender in everyone:
        if contender.compiled and on_host:
            continue
        compile_afresh()
        try:
            x, dy = inputs(shape, device)
            run = step(layer_of(contender, shape, device), x, dy)
            found = functions(run) if on_host else in_words(kernels(run))
        except Exception as error:  # what one library cannot do is a result, and the others go on
            found = f"  failed: {failure_in_words(error)}"
        what = ": functions by the time in them and in what they call" if on_host else ""
        print(f"{contender.name} at {shape}{what}\n{found}")


def functions(step: Step, steps: int = 300, lines: int = 60, order: str = "cumulative", warm: int = 20) -> str:
    """The functions that ``steps`` steps call. Backward runs in this thread, where the profiler sees it."""
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(warm):
            step()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(lines)
    return text.getvalue()


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, in microseconds."""

    name: str
    gap: float
    """How long the GPU waited before it."""
    took: float


def kernels(step: Step, steps: int = 8) -> list[Kernel]:
    """The kernels of a step in their order; medians over the steps."""
    for _ in range(3):
        step()
    return kernels_of(_traced(step, steps), steps)


@dataclass(frozen=True)
class Spent:
    """Seconds of a GPU in a step."""

    computing: float
    """It computes or copies, whatever it sends or receives meanwhile."""
    sending: float
    """It only sends or receives."""
    idle: float
    """It does nothing: it waits for the host."""


def spent(step: Step, steps: int = 3) -> Spent:
    """How long the GPU computes, sends and waits in a step, between the first kernel of these steps and the last. In a
    step before them ranks meet, which begin their traces one later than the other."""
    events = sorted(_traced(step, 1 + steps), key=lambda e: float(e["ts"]))  # type: ignore[arg-type]
    return spent_in(events[len(events) // (1 + steps) :], steps)


def spent_in(events: list[dict[str, object]], steps: int) -> Spent:
    """The same, of a trace in microseconds."""
    sends = [str(e["name"]).startswith("nccl") for e in events]
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]  # type: ignore[arg-type]
    computing = _covered([span for span, sent in zip(spans, sends, strict=True) if not sent])
    either = _covered(spans)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return Spent(*(t / steps / 1e6 for t in (computing, either - computing, whole - either)))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    end = total = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _traced(step: Step, steps: int) -> list[dict[str, object]]:
    """The work of the GPU in ``steps`` steps."""
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e.get("cat") in ON_GPU]


def by_kind(step: Step, steps: int = 4) -> str:
    """The GPU's time of a step by the kind of kernel, and the kernels that take most of it."""
    for _ in range(3):
        step()
    return kinds_of(_traced(step, steps), steps)


def kinds_of(events: Iterable[dict[str, Any]], steps: int, lines: int = 20) -> str:
    """The same, of a trace in microseconds."""
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    for event in events:
        name, took = str(event["name"]), event["dur"] / steps / 1e3
        small = name.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in small for word in words)), "other")
        kinds[kind] += took
        names[name[:110]] += took
    total = ", ".join(f"{kind} {took:.1f}" for kind, took in _most(kinds))
    listed = "\n".join(f"  {took:8.2f} ms  {name}" for name, took in _most(names)[:lines])
    return f"  the GPU's {sum(kinds.values()):.1f} ms of a step: {total}\n{listed}"


def _most(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """The entries, the longest first."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])


def kernels_of(events: list[dict[str, object]], steps: int) -> list[Kernel]:
    """The median step of a trace of several; the first, which starts on an idle GPU, is left out."""
    spans = sorted((float(e["ts"]), float(e["dur"]), str(e["name"])) for e in events)  # type: ignore[arg-type]
    each, left = divmod(len(spans), steps)
    if left:
        raise ValueError(f"{len(spans)} kernels are not {steps} equal steps")
    found = []
    for i in range(each):
        at = range(each + i, len(spans), each)
        gaps = [spans[j][0] - spans[j - 1][0] - spans[j - 1][1] for j in at]
        found.append(Kernel(spans[i][2], statistics.median(gaps), statistics.median(spans[j][1] for j in at)))
    return found


def in_words(found: list[Kernel]) -> str:
    """A line for each kernel."""
    busy, idle = sum(k.took for k in found), sum(k.gap for k in found)
    lines = [f"  after {k.gap:7.1f} µs idle  {k.took:9.1f} µs  {k.name[:110]}" for k in found]
    return "\n".join([f"  the GPU is busy {busy:.1f} µs of a step, and idle {idle:.1f} µs", *lines])
