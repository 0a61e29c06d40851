"""Optimizer states in formats: the time and memory of a step on a GPU, beside others.

python -m benchmarks.states                      a step of AdamW over matrices of a billion weights, on one GPU
python -m benchmarks.states --weights 268435456  of fewer
python -m benchmarks.states --model llama-1b     over the parameters of a model, most of them small

``benchmarks.state_losses`` has the losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.evidence import LIBRARIES
from lpq.optim import QuantizedStates

FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8, fp8 by block": {"exp_avg": "mxfp8", "exp_avg_sq": "fp8(scaling=block, pow2=false)"},
    "fp8 by block": {"exp_avg": "fp8(scaling=block)", "exp_avg_sq": "fp8(scaling=block, pow2=false)"},
}
Make = Callable[[Any], Optimizer]
SIDE = 8192
Shape = tuple[int, ...]


def llama(vocabulary: int, layers: int, width: int, keys: int, wide: int) -> list[Shape]:
    """The parameters of a Llama whose head is its embedding."""
    matrices = [(width, width), (keys, width), (keys, width), (width, width), *2 * [(wide, width)], (width, wide)]
    return [(vocabulary, width), *layers * [*matrices, (width,), (width,)], (width,)]


def gpt(vocabulary: int, layers: int, width: int) -> list[Shape]:
    """The parameters of the models of ``lpq compare``."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [(vocabulary, width), *layers * [*matrices, (width,), (width,)], (width,)]


MODELS: dict[str, list[Shape]] = {
    "llama-1b": llama(128256, 16, 2048, 512, 8192),
    "gpt-60m": gpt(256, 9, 768),
}


def stored(formats: dict[str, Any], params: Any, **options: Any) -> Optimizer:
    return QuantizedStates(AdamW(params, **options), **formats)


def others(params: Any, name: str, **options: Any) -> Optimizer:
    """The 8-bit AdamW of another library."""
    module = importlib.import_module({"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}[name])
    made: Optimizer = module.AdamW8bit(params, **options)
    return made


def contenders(dtype: torch.dtype) -> dict[str, Make]:
    """The optimizers for parameters of a dtype, whose states have that dtype where they are torch's."""
    usual = str(dtype).removeprefix("torch.")
    found: dict[str, Make] = {f"torch fused, {usual} states": partial(AdamW, fused=True)}
    found |= {f"lpq, {name}": partial(stored, formats) for name, formats in FORMATS.items()}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            found[f"{name} AdamW8bit"] = partial(others, name=name)
    return found


class Step(NamedTuple):
    """A step as it was measured."""

    alone: float
    """The milliseconds of a step for which the GPU had waited, so that what the host needs is in them (the median)."""
    in_a_row: float
    """The milliseconds of a step among others, in which the host may run ahead of the GPU."""
    states: int
    """The bytes of the states."""
    peak: int
    """The bytes beside them at the peak."""


def measured(make: Make, dtype: torch.dtype, shapes: Sequence[Shape], rounds: int = 20) -> Step:
    params = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    alone = statistics.median(_timed(optimizer.step) for _ in range(rounds))
    in_a_row = min(_timed(lambda: [optimizer.step() for _ in range(rounds)]) for _ in range(3)) / rounds
    return Step(alone, in_a_row, held - empty, torch.cuda.max_memory_allocated() - held)


def _timed(function: Callable[[], object]) -> float:
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def speed(shapes: Sequence[Shape], title: str) -> None:
    weights = sum(math.prod(shape) for shape in shapes)
    libraries = [f", {name} {version(name)}" for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    print(
        f"{date.today()}; {torch.cuda.get_device_name()}, torch {torch.__version__}{''.join(libraries)}; "
        f"{weights:,} weights in {title}"
    )
    print("| weights | optimizer | ms, alone | ms, in a row | bytes of states a weight | GiB beside them at the peak |")
    print("|---|---|---:|---:|---:|---:|")
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in contenders(dtype).items():
            torch.cuda.empty_cache()
            step = measured(make, dtype, shapes)
            usual = str(dtype).removeprefix("torch.")
            print(
                f"| {usual} | {name} | {step.alone:.2f} | {step.in_a_row:.2f} | {step.states / weights:.2f} | "
                f"{step.peak / 2**30:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 30)
    parser.add_argument("--model", choices=MODELS)
    given = parser.parse_args()
    if given.model is not None:
        speed(MODELS[given.model], f"the {len(MODELS[given.model])} parameters of {given.model}")
    else:
        speed(max(given.weights // SIDE**2, 1) * [(SIDE, SIDE)], f"matrices of {SIDE}x{SIDE}")
