"""The least time that a step in FP8 can take: its three GEMMs alone, and the fewest bytes of quantizing.

The GEMMs are timed by themselves in the run that they are compared with, in the accumulation mode that the recipe uses:
fast in forward, exact for both gradients. Each of x, w and dy is read as often as its scaling needs, and both its
operands are written, at the copy speed of the run.

GEMMs alone draw more power than GEMMs with casts between them, and a GPU at its limit of power then lowers its clock.
So a floor has a second reading: the same GEMMs and copies of the same bytes in one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.bench.layers import LayerSize
from lpq.bench.timing import Step, Timing

BF16_BYTES = 2
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
Operand = tuple[Tensor, Tensor]
"""Data and scales."""


@dataclass(frozen=True)
class Floor:
    """The least traffic and time that a recipe needs."""

    scales: str
    """The part of an operand that shares a scale: ``tensor``, ``row`` or ``block``."""
    reads: int
    """How often each tensor must be read: twice where its scale must be known before its first element is encoded."""
    gradients: torch.dtype = E4M3
    """The element type of dy."""

    @property
    def bytes_of_element(self) -> int:
        """Read and written by quantizing one element: bf16 in, a byte for each operand out. Scales are left out."""
        return self.reads * BF16_BYTES + 2

    def quantized_bytes(self, shape: LayerSize) -> int:
        """Read and written by quantizing x, w and dy."""
        return sum(shape.tensors) * self.bytes_of_element

    def seconds(self, shape: LayerSize, gemms: float, copy_speed: float) -> float:
        """The floor, from the time of the three GEMMs and from bytes a second."""
        return gemms + self.quantized_bytes(shape) / copy_speed

    def record(self, shape: LayerSize, gemms: Timing, stream: Timing, copy_speed: float) -> dict[str, Any]:
        """The entry of the floor in a result."""
        return {
            "gemms_ms": gemms.median * 1e3,
            "bytes": self.quantized_bytes(shape),
            "ms": self.seconds(shape, gemms.median, copy_speed) * 1e3,
            "stream_ms": stream.median * 1e3,
        }


FLOORS = {
    "fp8-current": Floor("tensor", reads=2, gradients=E5M2),
    "fp8-delayed": Floor("tensor", reads=1, gradients=E5M2),
    "fp8-row": Floor("row", reads=2),
    "fp8-block": Floor("block", reads=1),
}
"""The floors of the recipes whose three GEMMs are one call each."""


class Bare:
    """The three GEMMs of a step with nothing around them, and copies of what quantizing would move."""

    def __init__(self, floor: Floor, shape: LayerSize, device: torch.device, sets: int = 2) -> None:
        self._sets = [_three(floor, shape, device) for _ in range(sets)]
        self._turn = 0
        # A copy reads and writes: it moves twice the bytes of its tensor.
        sizes = [elements * floor.bytes_of_element // 2 for elements in shape.tensors]
        sources = [torch.randint(256, (size,), dtype=torch.uint8, device=device) for size in sizes]
        self._copies = [(torch.empty_like(source), source) for source in sources]

    def gemms(self) -> None:
        """The GEMMs; operands take turns, so that none is found in a cache."""
        for gemm in self._next():
            gemm()

    def stream(self) -> None:
        """The copies of x and w, the forward, the copy of dy, both gradients."""
        x, w, dy = self._copies
        fprop, dgrad, wgrad = self._next()
        for target, source in (x, w):
            target.copy_(source)
        fprop()
        dy[0].copy_(dy[1])
        dgrad()
        wgrad()

    def steps(self, name: str) -> dict[str, Step]:
        return {f"gemms of {name}": self.gemms, f"stream of {name}": self.stream}

    def _next(self) -> list[Callable[[], Tensor]]:
        self._turn = (self._turn + 1) % len(self._sets)
        return self._sets[self._turn]


def _three(floor: Floor, shape: LayerSize, device: torch.device) -> list[Callable[[], Tensor]]:
    tokens, inputs, outputs = shape.tokens, shape.inputs, shape.outputs
    make = partial(_operand, floor.scales, device)
    multiply = partial(_gemm, exact=floor.scales == "block")  # blocks are summed in fp32 in any case
    return [
        multiply(make(tokens, inputs), make(outputs, inputs, weight=True), fast=True),
        multiply(make(tokens, outputs, floor.gradients), make(inputs, outputs, weight=True), fast=False),
        multiply(make(outputs, tokens, floor.gradients), make(inputs, tokens), fast=False),
    ]


def _gemm(a: Operand, b: Operand, fast: bool, exact: bool) -> Callable[[], Tensor]:
    return partial(
        torch._scaled_mm, a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=torch.bfloat16,
        use_fast_accum=fast and not exact,
    )  # fmt: skip


def _operand(
    scales: str, device: torch.device, rows: int, inner: int, dtype: torch.dtype = E4M3, weight: bool = False
) -> Operand:
    data = torch.randn(rows, inner, device=device, dtype=torch.bfloat16).to(dtype)
    if scales == "tensor":
        return data, torch.ones((), device=device)
    if scales == "row":
        return data, torch.ones(rows, 1, device=device)
    if weight:
        return data, torch.ones(rows // BLOCK, inner // BLOCK, device=device)
    return data, torch.ones(inner // BLOCK, rows, device=device).t()  # the rows lie next to each other
