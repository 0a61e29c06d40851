"""Casts: how fast each format encodes, transposes and decodes, as a share of the copy speed of the same run.

    python benchmarks/casts.py [--rows 16384 --cols 8192 --only mxfp8 --json benchmarks/results/casts.json]

Bytes are counted once for each read of the input that the algorithm needs (two where the amax of the whole tensor must
be known before the first element is encoded) and once for each byte written. Which kernel ran stands beside each line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpq
from lpq.core import Storage, operations
from lpq.ops import choose


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    quantizer: str
    sides: str
    """``row``, ``col`` or ``both``; ``transpose`` or ``decode``."""
    target: float
    """The share of the copy speed to reach."""
    reads: int = 1
    known: bool = False
    """The amax is given, and measured on the way."""


def encodings(name: str, quantizer: str, reads: int = 1, known: bool = False, both: float = 0.90) -> list[Case]:
    return [
        Case(name, quantizer, "row", 0.92, reads, known),
        Case(name, quantizer, "col", 0.90, reads, known),
        Case(name, quantizer, "both", both, reads, known),
    ]


CASES = [
    *encodings("mxfp8", "mxfp8"),
    *encodings("fp8 current", "fp8", reads=2),
    *encodings("fp8 delayed", "fp8(scaling=delayed)", known=True),
    *encodings("fp8 row", "fp8(scaling=row)", reads=2),
    *encodings("fp8 block 1x128", "fp8(scaling=block)"),
    *encodings("fp8 block 128x128", "fp8(scaling=block, block=128x128)"),
    *encodings("nvfp4 1x16", "nvfp4", reads=2),
    *encodings("nvfp4 16x16", "nvfp4(block=16x16)", reads=2),
    Case("nvfp4 RHT", "nvfp4(rht=true)", "both", 0.70, 2),
    Case("nvfp4 RHT stochastic", "nvfp4(rht=true, stochastic=true)", "both", 0.70, 2),
    Case("fp8 current", "fp8", "transpose", 0.85),
    Case("fp8 block 128x128", "fp8(scaling=block, block=128x128)", "transpose", 0.85),
    Case("nvfp4 16x16", "nvfp4(block=16x16)", "transpose", 0.85),
    Case("mxfp8", "mxfp8", "decode", 0.85),
    Case("fp8 current", "fp8", "decode", 0.85),
    Case("nvfp4 1x16", "nvfp4", "decode", 0.85),
]


def seconds(run: Callable[[int], object], busy: Callable[[], object], repeats: int = 12, batch: int = 8) -> float:
    """The median time of a call on the GPU. ``busy`` keeps the GPU occupied while the calls of a batch are queued."""
    for i in range(3):
        run(i)
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(6):
            busy()
        start.record()
        for j in range(batch):
            run(i + j)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / batch)
    return statistics.median(times)


def measure(case: Case, inputs: list[Tensor], busy: Callable[[], object]) -> dict[str, Any]:
    """Run one case on tensors in turn, so that none of them is in a cache."""
    quantizer = lpq.quantizer(case.quantizer)
    x = inputs[0]
    seed = torch.tensor(1, device=x.device)
    row = quantizer.side("row") if case.sides != "col" else None
    col = quantizer.side("col") if case.sides in ("col", "both") else None
    if case.sides in ("transpose", "decode"):
        operand = operations.quantize(x, None, row, None, seed)[0]
        assert operand is not None
        made = operations.transpose(operand) if case.sides == "transpose" else operations.decode(operand, x.dtype)
        moved = operand.nbytes + made.nbytes
        operation = case.sides
        texts: tuple[str, ...] = (quantizer.text,)

        def run(i: int) -> object:
            return operations.transpose(operand) if operation == "transpose" else operations.decode(operand, x.dtype)
    else:
        stats = operations.measure(x, row, col) if case.known else None
        operands = operations.quantize(x, stats, row, col, seed)[:2]
        moved = case.reads * x.nbytes + sum(o.nbytes for o in operands if isinstance(o, Storage))
        operation = "quantize"
        texts = tuple(side.text for side in (row, col) if side is not None)

        def run(i: int) -> object:
            return operations.quantize(inputs[i % len(inputs)], stats, row, col, seed, measure=case.known)

    took = seconds(run, busy)
    choice = choose(operation, texts, x.device)
    return {
        **asdict(case),
        "microseconds": took * 1e6,
        "bytes": moved,
        "speed": moved / took,
        "kernel": choice.kernel.impl if choice.kernel is not None else "reference",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--only", help="only the cases whose name begins so")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "casts.json")
    options = parser.parse_args()
    inputs = [torch.randn(options.rows, options.cols, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    targets = [torch.empty_like(inputs[0]) for _ in range(2)]

    def copy(i: int = 0) -> Tensor:
        return targets[i % 2].copy_(inputs[i % 2])

    copied = seconds(copy, copy, repeats=30)
    copy_speed = 2 * inputs[0].nbytes / copied
    print(f"copy {copy_speed / 1e12:.2f} TB/s ({torch.cuda.get_device_name()}, {options.rows} x {options.cols} bf16)")
    results = []
    for case in CASES:
        if options.only and not case.name.startswith(options.only):
            continue
        result = measure(case, inputs, copy)
        result["share"] = result["speed"] / copy_speed
        results.append(result)
        met = "" if result["share"] >= case.target else f"  below {case.target:.0%}"
        print(
            f"{case.name:22} {case.sides:10} {result['microseconds']:9.1f} us {result['speed'] / 1e12:6.2f} TB/s "
            f"{result['share']:7.1%}  {result['kernel']}{met}"
        )
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": options.rows,
        "cols": options.cols,
        "copy_speed": copy_speed,
        "cases": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
