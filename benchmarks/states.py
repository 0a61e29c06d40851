"""Optimizer states in formats: the time and memory of a step on a GPU, and losses of a small model, beside others.

python -m benchmarks.states                      a step of AdamW over matrices of a billion weights, on one GPU
python -m benchmarks.states --weights 268435456  of fewer
python -m benchmarks.states --loss               losses beside fp32 states of the same seeds, on a CPU, in a minute
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lpq.optim import QuantizedStates

FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8, fp8 by block": {"exp_avg": "mxfp8", "exp_avg_sq": "fp8(scaling=block, pow2=false)"},
    "fp8 by block": {"exp_avg": "fp8(scaling=block)", "exp_avg_sq": "fp8(scaling=block, pow2=false)"},
}
Make = Callable[[Any], Optimizer]
SIDE = 8192


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
    for name in ("torchao", "bitsandbytes"):
        if importlib.util.find_spec(name) is not None:
            found[f"{name} AdamW8bit"] = partial(others, name=name)
    return found


def measured(make: Make, dtype: torch.dtype, weights: int, rounds: int = 20) -> tuple[float, int, int]:
    """The milliseconds of a step (the median), the bytes of the states, and the bytes beside them at the peak."""
    params = [
        nn.Parameter(torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)) for _ in range(max(weights // SIDE**2, 1))
    ]
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
    times = []
    for _ in range(rounds):
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), held - empty, torch.cuda.max_memory_allocated() - held


def speed(weights: int) -> None:
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {weights:,} weights in matrices of {SIDE}x{SIDE}"
    )
    print("| weights | optimizer | ms a step | bytes of states a weight | GiB beside them at the peak |")
    print("|---|---|---:|---:|---:|")
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in contenders(dtype).items():
            torch.cuda.empty_cache()
            ms, states, peak = measured(make, dtype, weights)
            usual = str(dtype).removeprefix("torch.")
            print(f"| {usual} | {name} | {ms:.2f} | {states / weights:.2f} | {peak / 2**30:.2f} |", flush=True)


# ---------------------------------------------------------------------------------- losses

SEEDS, STEPS, WIDTH, SYMBOLS = (0, 1, 2, 3), 200, 64, 16


class Predictor(nn.Module):
    """A residual network that predicts a symbol from the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 256), nn.GELU(), nn.Linear(256, 2 * WIDTH))
            for _ in range(2)
        )
        self.out = nn.Linear(2 * WIDTH, SYMBOLS)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.symbols(pairs).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.out(x)
        return out


def loss(seed: int, make: Make) -> float:
    """The mean loss of the last quarter of a run: symbols of a random source that looks two symbols back."""
    source = torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(7)).mul(2).softmax(-1)
    torch.manual_seed(seed)
    model = Predictor()
    optimizer = make(model.parameters())
    random, found = torch.Generator().manual_seed(1000 + seed), []
    for _ in range(STEPS):
        pairs = torch.randint(SYMBOLS, (128, 2), generator=random)
        wanted = torch.multinomial(source[pairs[:, 0], pairs[:, 1]], 1, generator=random)[:, 0]
        value = nn.functional.cross_entropy(model(pairs), wanted)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        found.append(value.item())
    return statistics.mean(found[-STEPS // 4 :])


def losses() -> None:
    for betas in ((0.9, 0.95), (0.9, 0.999)):
        options: dict[str, Any] = {"lr": 2e-3, "betas": betas}
        exact = [loss(seed, partial(AdamW, **options)) for seed in SEEDS]
        spread = statistics.stdev(exact)
        print(f"betas {betas}: fp32 states {statistics.mean(exact):.4f}, standard deviation over seeds {spread:.4f}")
        for name, formats in FORMATS.items():
            gaps = [loss(seed, partial(stored, formats, **options)) - e for seed, e in zip(SEEDS, exact, strict=True)]
            mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
            shown = ", ".join(f"{gap:+.4f}" for gap in gaps)
            print(f"  {name}: {mean:+.4f} ± {deviation:.4f} beside fp32 of the same seed ({shown})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 30)
    parser.add_argument("--loss", action="store_true")
    given = parser.parse_args()
    losses() if given.loss else speed(given.weights)
