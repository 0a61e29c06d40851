"""A layout as data: the contents of each buffer of an encoded matrix, declared once.

An encoded matrix of logical shape ``[rows, cols]`` (``cols`` is the contraction) is a few named buffers. One element
of a buffer covers a block of ``block[0] x block[1]`` logical elements; ``None`` is the whole dimension. Packing needs
no second notion: two 4-bit values in a byte are a buffer of bytes with block ``(1, 2)``. A block may have several
elements, along a last dimension: eight 3-bit values are 3 bytes for a block ``(1, 8)``. Allocation, fake tensors,
slicing, moving, saving and gathering all follow from these declarations and are written once, in the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Block = tuple[int | None, int | None]
DIMENSIONS = ("rows", "columns")
"""The names of the dimensions of a matrix."""


def blocks(size: int, block: int | None) -> int:
    """How many blocks cover a dimension of ``size``; the last one may be ragged."""
    return 1 if block is None else -(-size // block)


def _check_block(what: str, block: object) -> None:
    if not (
        isinstance(block, tuple) and len(block) == 2 and all(n is None or (type(n) is int and n > 0) for n in block)
    ):
        raise ValueError(
            f"{what} has block={block!r}: it is (rows, columns), each a whole number from 1 on, or None for all of them"
        )


def row_major(tensor: Tensor) -> Tensor:
    """Return the same values row by row in memory; the tensor itself if it lies so. To torch a tensor is contiguous
    whatever stride a dimension of one element has. Its bytes can be viewed only if it has the strides of a fresh
    tensor, which a compiler expects, too.
    """
    tensor, strides, step = tensor.contiguous(), [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    usual = tuple(reversed(strides))
    return tensor if tensor.stride() == usual else tensor.as_strided(tensor.shape, usual)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its elements."""
    return row_major(tensor).view(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor as bytes where its elements are single bytes: 8-bit floats lack some of torch's operations, and
    Python's pickle refuses them."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class Covering:
    """A named tensor that has one number, or some, for each block of a matrix."""

    name: str
    block: Block
    values: int | None = None

    @property
    def of_all(self) -> bool:
        """Whether it is of the whole matrix."""
        return self.block == (None, None)

    def unit(self, dim: int) -> int | None:
        """Logical rows or columns that cannot be cut apart; None: the whole dimension."""
        return self.block[dim]

    def lattice(self, rows: int, cols: int) -> tuple[int, int]:
        """How many blocks lie below each other, and side by side, in a matrix ``[rows, cols]``."""
        return blocks(rows, self.block[0]), blocks(cols, self.block[1])

    def grid(self, rows: int, cols: int) -> tuple[int, ...]:
        """The shape of the tensor for a matrix ``[rows, cols]``: its lattice, and the values of each block if they are
        several. A value of the whole matrix has no lattice: one value is 0-dimensional."""
        lattice = () if self.block == (None, None) else self.lattice(rows, cols)
        return lattice if self.values is None else (*lattice, self.values)


@dataclass(frozen=True)
class Buffer(Covering):
    """One buffer of a storage class."""

    name: str
    dtype: torch.dtype | None
    """Its dtype; None: the dtype of the tensor that is encoded."""
    block: Block = (1, 1)
    """Logical rows and columns that one element covers; None: the whole dimension. All parts along that then
    have the same buffer, if a statistic is of the whole dimension too; else the operand has no parts
    (``Quantizer.uncut``)."""
    pad: int = 1
    """Columns are padded to a multiple of this (a multiple of ``block[1]``)."""
    column_major: bool = False
    """Whether encoding leaves it in memory column by column, as kernels write scales fastest and as some products read
    them. Its shape is the same, and every reader takes any order: kept, gathered and saved buffers are row-major."""
    values: int | None = None
    """How many numbers it holds for each block, along a last dimension of their own (a codebook, codes that do not
    divide a byte); None: one, and no such dimension. They are never cut apart."""
    from_stats: bool = False
    """Whether its values follow from the statistics alone, as scales do. A format that declares it of a buffer thereby
    declares that zeros in place of elements raise no statistic, and that a value of any other buffer follows from the
    statistics and from the elements of its own block. Ranks with shards of master weights then exchange statistics, if
    each element has codes of its own (``cast_master_weights``), and otherwise all elements."""

    def __post_init__(self) -> None:
        _check_block(f"buffer {self.name!r}", self.block)
        if self.column_major and self.block == (None, None):
            raise ValueError(f"buffer {self.name!r} is one value, block=(None, None): it cannot be column_major")
        if self.column_major and self.values is not None:
            raise ValueError(f"buffer {self.name!r} has {self.values} values for each block: it cannot be column_major")
        if self.values is not None and self.values < 1:
            raise ValueError(f"buffer {self.name!r} has values={self.values}: say how many each block has, 1 or more")

    def lattice(self, rows: int, cols: int) -> tuple[int, int]:
        return super().lattice(rows, blocks(cols, self.pad) * self.pad)

    def empty(
        self, rows: int, cols: int, dtype: torch.dtype, device: torch.device, count: Sequence[int] = ()
    ) -> Tensor:
        """Allocate the buffer of a matrix, uninitialised, or the buffer of a stack with the leading dimensions
        ``count``."""
        return torch.empty((*count, *self.grid(rows, cols)), dtype=self.dtype or dtype, device=device)

    def fresh(self, rows: int, cols: int, x: Tensor, count: Sequence[int] = ()) -> Tensor:
        """Allocate the buffer for an encoding of ``x``, in the memory order of encoding; the buffer of a stack is
        row-major."""
        grid, dtype = self.grid(rows, cols), self.dtype or x.dtype
        if count or not self.column_major:
            return x.new_empty((*count, *grid), dtype=dtype)
        apart = torch.sym_max(grid[0], 1)  # type: ignore[no-untyped-call]  # a compiler may have no number of rows yet
        return x.new_empty_strided(grid, (1, apart), dtype=dtype)

    def laid(self, tensor: Tensor) -> Tensor:
        """Return the same values in the memory order of encoding; the tensor itself if it lies so."""
        if not self.column_major:
            return row_major(tensor)
        strides = 1, max(tensor.shape[0], 1)
        if tensor.stride() == strides:
            return tensor
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)

    def unit(self, dim: int) -> int | None:
        step = self.block[dim]
        return step if step is None or dim == 0 else max(step, self.pad)

    def narrow(self, tensor: Tensor, dim: int, start: int, stop: int, size: int) -> Tensor | None:
        """The elements that cover ``[start, stop)`` of a logical dimension; None where that would cut a unit."""
        step, unit = self.block[dim], self.unit(dim)
        if step is None or unit is None:
            return tensor
        if start % unit or (stop % unit and stop != size):
            return None
        return tensor.narrow(dim, start // step, blocks(stop - start, unit) * unit // step)


@dataclass(frozen=True)
class Stat(Covering):
    """One statistic that a format needs of the matrix that it encodes.

    A non-negative fp32 value for each block, such as an amax, combined across ranks by MAX; NaN is larger than
    every number. Or a count, in int64, which is summed.
    """

    name: str
    block: Block = (None, None)
    """Logical rows and columns that one element covers; None: the whole dimension."""
    reduce: Literal["max", "sum"] = "max"
    """How the values of several ranks make one. ``"sum"`` is for counts, in int64: only their sum is the same however
    a tensor is cut."""
    round: Literal[1, 2] = 1
    """2: it is measured by ``Quantizer.measure_again``, once the statistics of round 1 are reduced over all ranks."""
    largest: bool = False
    """Whether it is the largest magnitude of its elements, NaN if one of them is. A compiler that traces measures it of
    a whole matrix itself, without ``measure``, and small second moments are raised to a share of it (``lpq.optim``)."""

    def __post_init__(self) -> None:
        _check_block(f"statistic {self.name!r}", self.block)
        if self.reduce not in ("max", "sum"):
            raise ValueError(
                f"statistic {self.name!r} has reduce={self.reduce!r}: choose 'max', or 'sum' for counts; for a least "
                "value measure the largest of -x, at least 0"
            )

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64 if self.reduce == "sum" else torch.float32

    def zeros(self, rows: int, cols: int, device: torch.device) -> Tensor:
        return torch.zeros(self.grid(rows, cols), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StateBuffer:
    """One fp32 tensor that lives across steps (an amax history, a calibrated amax); it starts as zeros. Ranks combine
    it by MAX."""

    name: str
    shape: tuple[int, ...] = ()


def for_dtype(layout: Sequence[Buffer], tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The same bytes for a matrix of another dtype; a buffer in the dtype of the matrix is cast."""
    return [t.to(dtype) if b.dtype is None else t for b, t in zip(layout, tensors, strict=True)]


def check_there(buffer: Tensor) -> None:
    """Refuse an operand of a sharded weight that was not gathered: its buffers have no memory then."""
    if type(buffer) is Tensor and not buffer.data_ptr() and buffer.numel() and not buffer.is_meta:
        raise RuntimeError(
            "this operand of a sharded weight is not there: forward gathers row operands and backward column operands. "
            "If forward runs again in backward inside a compiled module, wrap it with PyTorch's checkpoint_wrapper"
        )
