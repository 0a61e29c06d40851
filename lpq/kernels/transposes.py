"""The host's side of kernels that transpose encoded matrices tile by tile: one in a launch, or several.

Their sources include ``transposes.cuh``. The format decides what an element is, and which buffers lie beside elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.kernels import tiles
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.tiles import BROAD, UNIT, Shape

Launch = Callable[..., None]
Launches = Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]], None]
"""A launch for several matrices: it takes the buffers of each and the buffers of its transpose."""
Size = tuple[int, int]
"""Rows and columns."""


def transpose_kernels(source: str, name: str, arguments: str) -> Mapping[int, CudaKernel]:
    """A kernel that transposes by tiles, for each ``LPQ_WIDE`` with which it is compiled."""
    return {
        width: CudaKernel(
            source, name, arguments, threads=2 * width, shared=0 if width == UNIT else 256 * width, waits=True
        )
        for width in (UNIT, BROAD)
    }


@cache
def wide(width: int) -> tuple[str, ...]:
    """The macros of such a kernel."""
    return (f"LPQ_WIDE={width}",)


def tiled(sizes: Sequence[Size], large: Shape, small: Shape) -> tuple[Shape, int]:
    """The size of tiles, large if there are many of them and small otherwise, and the number of tiles."""
    many = sum(tiles.tiles(*size, large) for size in sizes) >= tiles.MANY_TILES
    shape = large if many else small
    return shape, sum(tiles.tiles(*size, shape) for size in sizes)


def bind_several(
    kernel: CudaKernel, shape: Shape, sizes: Sequence[Size], most: int, buffers: int, rest: tuple[int, ...],
    device: torch.device,
) -> Launches:  # fmt: skip
    """Launches of a kernel for at most ``most`` matrices. For each matrix it takes the address of every buffer, each
    followed by the address of its transpose, and the sizes; its other arguments follow the number of matrices."""
    step = 2 * buffers + 1
    bound: list[tuple[slice, list[int], Launch]] = []
    for first in range(0, len(sizes), most):
        some = slice(first, first + most)
        numbers = [n for rows, cols in sizes[some] for n in (*[0] * (step - 1), rows << 32 | cols)]
        numbers += [0] * (step * most - len(numbers))
        blocks = sum(tiles.tiles(*size, shape) for size in sizes[some])
        launch = kernel.bind(device.index or 0, wide(kernel.threads // 2), blocks)
        bound.append((some, [*numbers, len(sizes[some]), *rest], launch))

    def turn(several: Sequence[Sequence[Tensor]], out: Sequence[Sequence[Tensor]]) -> None:
        for some, numbers, launch in bound:
            given, at = numbers.copy(), 0
            for each, transposed in zip(several[some], out[some], strict=True):
                given[at : at + step - 1] = [t.data_ptr() for pair in zip(each, transposed, strict=True) for t in pair]
                at += step
            launch(*given)

    return turn
