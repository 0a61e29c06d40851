"""The right constants of ``lpq.operations.group_choice`` for the GPU of this machine.

python -m benchmarks.group_choice

They decide when products of experts multiply codes, and from how many rows per expert a recipe saves time. All times
are of FP8 with scales of rows, as in ``fp8-row``: fast sums in forward, exact ones in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import grouped_mm

from benchmarks import environment
from benchmarks.grouped import Data, in_fp8
from benchmarks.shapes import GROUPED, Experts
from benchmarks.timing import Effort, Step, Timing, on_gpu
from lpq.operations import group_choice

ROWS = (128, 256, 512, 1024, 2048, 4096)
"""Rows of an expert at which exact sums are tried."""
RECIPE = "fp8-row"
Clock = Callable[[dict[str, Step], Effort], dict[str, Timing]]


class Products(NamedTuple):
    """Seconds of a step's three products."""

    bf16: float
    exact: float
    """In FP8, summed exactly in all three."""
    mixed: float
    """Summed exactly in backward alone."""


def measured(shape: Experts, effort: Effort, device: torch.device, clock: Clock) -> Products:
    """The products of experts alone, in bf16 and in FP8."""
    steps = {f"bf16 {name}": step for name, step in _in_bf16(shape, device).items()}
    for fast in (True, False):
        steps |= {f"{fast} {name}": step for name, step in in_fp8(shape, device, fast).items()}
    taken = {name: timing.median for name, timing in clock(steps, effort).items()}
    exact = [taken[f"False {name}"] for name in ("fprop", "dgrad", "wgrad")]
    bf16 = sum(taken[f"bf16 {name}"] for name in ("fprop", "dgrad", "wgrad"))
    return Products(bf16, sum(exact), sum(exact) - exact[0] + taken["True fprop"])


def exact_from(found: Sequence[tuple[int, Products]]) -> int | None:
    """From how many rows on, of those that were tried, exact sums take less than bf16; None: they never do."""
    least = None
    for rows, products in sorted(found, reverse=True):
        if products.exact >= products.bf16:
            break
        least = rows
    return least


def saved(shape: Experts, products: Products) -> float:
    """Seconds that a product of codes takes less than one in bf16, for a multiplication or an addition."""
    operations = 2 * shape.experts * shape.tokens * shape.inputs * shape.outputs
    return (products.bf16 - products.mixed) / (3 * operations)


def encoding(shape: Experts, products: Products, layer: float) -> float:
    """Seconds that a layer takes beside its products, for an element of x, w and dy."""
    return (layer - products.mixed) / sum(shape.tensors)


def lines(shapes: Sequence[Experts], effort: Effort, device: torch.device, clock: Clock) -> Iterator[str]:
    """Yield the times at each shape, and at the end the constants: those of time by the first shape."""
    least: list[int | None] = []
    for shape in shapes:
        found = []
        for rows in ROWS:
            products = measured(replace(shape, tokens=rows), effort, device, clock)
            found.append((rows, products))
            yield f"{replace(shape, tokens=rows)}: products in FP8, exact, ÷ bf16 {products.exact / products.bf16:.2f}"
        least.append(exact_from(found))
    large = shapes[0]
    products = measured(large, effort, device, clock)
    layer = clock({"layer": Data(large, device).of(RECIPE)}, effort)["layer"].median
    agreed = None if None in least else max(rows for rows in least if rows is not None)
    yield f"EXACT_FROM = {agreed}  # now {group_choice.EXACT_FROM}; by shape: {least}"
    yield f"SAVED = {saved(large, products):.2g}  # now {group_choice.SAVED:.2g}"
    yield f"ENCODING = {encoding(large, products, layer):.3g}  # now {group_choice.ENCODING:.3g}"


def _in_bf16(shape: Experts, device: torch.device) -> dict[str, Step]:
    data = Data(shape, device)
    x, w, dy, offs = data.x.detach(), data.w.detach(), data.dy, data.offs
    return {
        "fprop": lambda: grouped_mm(x, w.transpose(-2, -1), offs=offs),
        "dgrad": lambda: grouped_mm(dy, w, offs=offs),
        "wgrad": lambda: grouped_mm(dy.t(), x, offs=offs),
    }


def main() -> int:
    """Print them; the exit status is 2 where nothing can be measured."""
    if (lack := environment.lacking(1)) is not None:
        print(f"benchmarks: {lack}", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), torch.__version__)
    for line in lines(GROUPED, Effort(), torch.device("cuda"), on_gpu):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
