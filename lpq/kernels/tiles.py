"""The host's side of kernels that are made of ``csrc/common``: tiles, inputs, and the amax of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import Fresh, fresh

Launch = Callable[..., None]


class Shape(NamedTuple):
    """Rows and columns of a tile, 8 x 8 of which a thread takes."""

    tall: int
    wide: int


UNIT = 128
"""The side of the squares that long blocks belong to."""
LOW, SQUARE, TALL = Shape(64, UNIT), Shape(UNIT, UNIT), Shape(256, UNIT)
"""Tall where a column operand is written, low where none is."""
BROAD = 256
"""Columns of a tile whose lines a whole warp reads: 2 to 4 percent faster than half a warp, for a row operand."""
LARGE_TILE = 96 << 10
"""Shared memory of a block that takes a tile of 256 x 256, in bytes."""
ELEMENTS = {torch.bfloat16: "LPQ_BF16", torch.float16: "LPQ_FP16", torch.float32: "LPQ_FP32"}
INPUTS = {dtype: f"LPQ_INPUT={element}" for dtype, element in ELEMENTS.items()}
"""The macro for the dtype of the input, or for the one that it is rounded to as it is read."""
OUTPUTS = {dtype: f"LPQ_OUTPUT={element}" for dtype, element in ELEMENTS.items()}
"""The macro for the dtype that is decoded to."""
PARTS = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=1024, waits=True)
FINISH = CudaKernel("common/amax.cu", "amax_finish", "PqP", threads=1024, waits=True)
ZERO = CudaKernel("common/amax.cu", "zero", "PqPq", threads=1024, waits=True)
MANY_BLOCKS = 264
"""Blocks of threads that share out a piece of memory of any size, on a GPU of any size."""
PER_PART = 1 << 15
PARTS_AT_ONCE = 2
"""Elements in which one block of threads searches the amax, and how many of these blocks a multiprocessor runs."""
MANY_TILES = 512
"""The number of tiles from which on larger ones pay."""


@cache  # a kernel keeps what it loaded, which no other one of the same source would know
def tile_kernels(source: str, name: str, arguments: str) -> Mapping[Shape, CudaKernel]:
    """A kernel of which each block of threads takes a tile, for each shape of tiles. Its last arguments, and macros of
    ``covering``, give the sizes of the matrix and of the tiles. It calls ``wait_for_the_one_before`` first."""
    kernels = {}
    for tall, wide in (LOW, SQUARE, TALL, *(Shape(shape.tall, BROAD) for shape in (LOW, SQUARE, TALL))):
        shared = LARGE_TILE if tall * wide > 256 * UNIT else 0
        threads = tall * wide // 64
        kernels[Shape(tall, wide)] = CudaKernel(
            source, name, f"{arguments}qq", threads=threads, shared=shared, waits=True
        )
    return kernels


@cache
def reading(held: torch.dtype, dtype: torch.dtype) -> tuple[str, ...]:
    """The macros for a matrix that is held in one dtype and rounded to another."""
    return (INPUTS[dtype],) if held is dtype else (INPUTS[dtype], "LPQ_ROUNDED")


@cache
def covering(shape: Shape, whole: bool) -> tuple[str, ...]:
    """The macros for tiles of a shape, which cover the matrix exactly or not."""
    return (f"LPQ_TALL={shape.tall}", f"LPQ_WIDE={shape.wide}", *(["LPQ_WHOLE"] if whole else []))


def is_whole(x: Tensor, rows: int, cols: int, shape: Shape) -> bool:
    """Whether tiles cover a matrix exactly, and all lines of an operand of it begin at multiples of 16 bytes."""
    return divides(rows, cols, shape) and x.data_ptr() % 16 == 0


def divides(rows: int, cols: int, shape: Shape) -> bool:
    """Whether tiles cover a matrix exactly."""
    return not (rows % shape.tall or cols % shape.wide)


def tiles(rows: int, cols: int, shape: Shape) -> int:
    """How many tiles cover a matrix: the blocks of a kernel that takes a tile each."""
    return -(-rows // shape.tall) * -(-cols // shape.wide)


def broad(x: Tensor, dtype: torch.dtype, shape: Shape) -> Shape:
    """``broadened`` tiles for a matrix that is rounded to ``dtype``."""
    aligned = x.data_ptr() % 16 == 0
    return broadened(x.shape[0], x.shape[1], x.dtype, shape) if aligned and x.dtype is dtype else shape


def broadened(rows: int, cols: int, dtype: torch.dtype, shape: Shape) -> Shape:
    """Tiles as tall, and broad where that pays: in a large aligned matrix of 16-bit numbers that they cover exactly.

    A block of 1024 threads, which a multiprocessor has to itself, must not need more than 64 registers for each.
    """
    many = 2 * MANY_TILES if shape == TALL else MANY_TILES
    wanted = Shape(shape.tall, BROAD)
    pays = rows * cols >= many * shape.tall * BROAD and dtype.itemsize == 2 and divides(rows, cols, wanted)
    return wanted if pays else shape


def at_once(blocks: int, each: int, device: int) -> int:
    """``blocks``, but no more than a GPU runs at the same time: ``each`` on a multiprocessor. Any number of them shares
    out the reads."""
    return min(blocks, each * multiprocessors(device))


@cache
def multiprocessors(device: int) -> int:
    """The number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 for none."""
    return tensor.data_ptr() if tensor is not None else 0


def amax_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest magnitudes (fp32) of pieces of a contiguous matrix, rounded to ``dtype``; the
    largest of them is the amax of the whole."""
    count = x.numel()
    parts = at_once(max(-(-count // PER_PART), 1), PARTS_AT_ONCE, x.get_device())
    out = x.new_empty((parts,), dtype=torch.float32)
    PARTS.launch(x.get_device(), reading(x.dtype, dtype), parts, x.data_ptr(), count, out.data_ptr())
    return out


def bind_amax_parts(held: torch.dtype, dtype: torch.dtype, count: int, device: torch.device) -> tuple[Fresh, Launch]:
    """``amax_parts`` of a matrix of ``count`` elements: the memory for the parts, and the launch that finds them,
    of the addresses of the matrix and of that memory."""
    parts = at_once(max(-(-count // PER_PART), 1), PARTS_AT_ONCE, device.index or 0)
    launch = PARTS.bind(device.index or 0, reading(held, dtype), parts)
    return fresh((parts,), torch.float32), lambda at, to: launch(at, count, to)


def amax_finish(parts: Tensor) -> Tensor:
    """The largest of some magnitudes, which order as their bits do: NaN above infinity."""
    out = parts.new_empty(())
    FINISH.launch(parts.get_device(), (), 1, parts.data_ptr(), parts.numel(), out.data_ptr())
    return out
