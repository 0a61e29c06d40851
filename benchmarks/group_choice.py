"""The right constants of ``lpq.operations.group_choice`` for the GPU of this machine.

python -m benchmarks.group_choice

They give from how many rows of each expert a recipe saves time. All times are of FP8 with scales of rows, as in
``fp8-row``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import grouped_mm

import lpq
from benchmarks import environment
from benchmarks.grouped import Data
from benchmarks.shapes import GROUPED, Experts
from lpq.bench.timing import Effort, Step, Timing, on_gpu
from lpq.core import Storage
from lpq.operations import group_choice
from lpq.operations.binding import Operand, Product, operand_like
from lpq.operations.group_products import bind
from lpq.operations.groups import encode_groups

ROWS = (128, 512, 1024, 2048, 4096)
"""Rows of an expert for which products are measured."""
RECIPE, FORMAT = "fp8-row", "fp8(scaling=row)"
Clock = Callable[[dict[str, Step], Effort], dict[str, Timing]]


class Products(NamedTuple):
    """Seconds of a step's three products."""

    bf16: float
    codes: float
    """The same in FP8."""


def measured(shape: Experts, effort: Effort, device: torch.device, clock: Clock) -> Products:
    """The products of experts alone, in bf16 and in FP8."""
    data = Data(shape, device)
    steps = {f"bf16 {name}": step for name, step in _in_bf16(data).items()}
    steps |= {f"codes {name}": step for name, step in _of_codes(data).items()}
    taken = clock(steps, effort)
    return Products(
        *(sum(t.median for name, t in taken.items() if name.startswith(which)) for which in ("bf16", "codes"))
    )


def saved(shape: Experts, products: Products) -> float:
    """Seconds that a product of codes takes less than one in bf16, for a multiplication or an addition."""
    operations = 2 * shape.experts * shape.tokens * shape.inputs * shape.outputs
    return (products.bf16 - products.codes) / (3 * operations)


def encoding(shape: Experts, products: Products, layer: float) -> float:
    """Seconds that a layer takes beside its products, for an element of x, w and dy."""
    return (layer - products.codes) / sum(shape.tensors)


def lines(shapes: Sequence[Experts], effort: Effort, device: torch.device, clock: Clock) -> Iterator[str]:
    """Yield the times at each shape, and at the end the constants, by the first shape."""
    for shape in shapes:
        for rows in ROWS:
            products = measured(replace(shape, tokens=rows), effort, device, clock)
            yield f"{replace(shape, tokens=rows)}: products in FP8 ÷ bf16 {products.codes / products.bf16:.2f}"
    large = shapes[0]
    products = measured(large, effort, device, clock)
    layer = clock({"layer": Data(large, device).of(RECIPE)}, effort)["layer"].median
    yield f"SAVED = {saved(large, products):.2g}  # now {group_choice.SAVED:.2g}"
    yield f"ENCODING = {encoding(large, products, layer):.3g}  # now {group_choice.ENCODING:.3g}"


def _in_bf16(data: Data) -> dict[str, Step]:
    x, w, dy, offs = data.x.detach(), data.w.detach(), data.dy, data.offs
    return {
        "fprop": lambda: grouped_mm(x, w.transpose(-2, -1), offs=offs),
        "dgrad": lambda: grouped_mm(dy, w, offs=offs),
        "wgrad": lambda: grouped_mm(dy.t(), x, offs=offs),
    }


def _of_codes(data: Data) -> dict[str, Step]:
    how, offs = lpq.quantizer(FORMAT), data.offs
    w = how.quantize(data.w.detach(), stack=True)
    x_row, x_col = encode_groups(how, data.x.detach(), offs, row=True, col=True)
    dy_row, dy_col = encode_groups(how, data.dy, offs, row=True, col=True)
    assert x_row is not None
    assert x_col is not None
    assert dy_row is not None
    assert dy_col is not None

    def product(a: Operand, b: Operand | Storage) -> Step:
        if isinstance(b, Storage):
            other, right = operand_like(b), b.tensors()
        else:
            other, right = b._replace(tensors=()), [*b.tensors, offs]
        multiply = bind(Product(a._replace(tensors=()), other, torch.bfloat16, offs.device))
        return lambda: multiply([*a.tensors, offs], right, None)

    assert w.row is not None
    assert w.col is not None
    return {"fprop": product(x_row, w.row), "dgrad": product(dy_row, w.col), "wgrad": product(dy_col, x_col)}


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
