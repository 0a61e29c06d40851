"""Fragments of many matrices cast at once: the tables that CUDA kernels read, and a format's description of its
kernels.

``lpq.distributed.cast_master_weights`` casts with these all formats that have a kernel for the operation ``cast``: its
``KernelSpec.impl`` is a function ``f(side) -> CastKernels``. The source of such kernels includes ``fragments.cuh``,
which lists what a format must write. A table has a row for each operand of each fragment, so that one launch serves all
of them, whatever their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.host_to_device import captured, on_device
from lpq.kernels.tiles import reading

THREADS = 256
TILE, SCALES, CODES = 128, 32, 4096
"""The share of one block of threads in each kernel: rows and columns, lines and columns of scales, bytes of codes."""
WORDS, SIDE = 4096, 64
"""Words that one block of threads sends, and rows and columns that it transposes."""
SEND = CudaKernel("common/fragments.cu", "send_words", "Pq", threads=THREADS, waits=True)
TURN = CudaKernel("common/fragments.cu", "turn", "Pq", threads=THREADS, waits=True)

Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class CastKernels:
    """How a format casts fragments of fp32 matrices. Its operands have a buffer of codes and one of scales, and may
    have a third: the amax of the matrix, which is then the first of two statistics. The last one is the amax of each
    block that has a scale."""

    measure: CudaKernel
    scales: CudaKernel
    codes: CudaKernel
    macros: tuple[str, ...]
    """The macros of all three, beside those for the direction and the block."""
    turned: tuple[int, ...] = ()
    """The bits of an element of each buffer, 4, 8 or 32, if transposing all of them makes the operand of the transposed
    matrix. Two elements of 4 bits are in a byte, and lines are padded to 16 elements."""

    def compiled_for(self, block: Block, *, col: bool, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
        """All macros, where a scale covers this block of the matrix, and elements are rounded to ``dtype``."""
        down, across = (step or 0 for step in block)
        rounded = () if dtype is torch.float32 else reading(torch.float32, dtype)
        column = ("LPQ_COL",) if col else ()
        return (*self.macros, f"LPQ_DOWN={down}", f"LPQ_ACROSS={across}", *column, *rounded)


def cast_kernels(source: str | Path) -> tuple[CudaKernel, CudaKernel, CudaKernel]:
    """The three kernels that ``LPQ_CAST`` of ``fragments.cuh`` makes in a source."""
    names = ("measure", "scales", "codes")
    measure, scales, codes = (CudaKernel(source, name, "Pq", threads=THREADS, waits=True) for name in names)
    return measure, scales, codes


class Fragment(NamedTuple):
    """One operand of a fragment. Fields that name a place in memory are pointers, 0 for none."""

    values: int
    codes: int
    scales: int
    kept: int
    amaxes: int
    overall: int
    used_amaxes: int
    used_overall: int
    factors: int
    ends: int
    reach: int
    ranks: int
    rows: int
    cols: int
    start: int
    stop: int
    codes_start: int
    codes_stop: int
    width: int

    def blocks(self, block: Block) -> tuple[int, int, int]:
        """How many blocks of threads each kernel takes for it, where a scale covers this block of the matrix."""
        (down, across), high, wide = block, self.rows, self.cols
        lines, columns = (1 if step is None else -(-size // step) for size, step in ((high, down), (wide, across)))
        measured = coded = 0
        if self.start < self.stop:
            first, last = (place // wide // TILE for place in (self.start, self.stop - 1))
            measured = (last - first + 1) * -(-wide // TILE)
            coded = -(-(self.codes_stop - self.codes_start // 4 * 4) // CODES)
        return measured, -(-lines // SCALES) * -(-columns // SCALES), coded


class SentWords(NamedTuple):
    """The elements of a fragment that a rank sends to the others: all, or those at both ends, which others may need."""

    values: int
    to: int
    start: int
    stop: int
    cols: int
    reach: int
    """How many elements at each end; -1: all elements."""
    rank: int
    words: int


class Turned(NamedTuple):
    """A matrix to transpose."""

    source: int
    to: int
    rows: int
    cols: int
    bits: int
    """The bits of an element. Two of 4 bits are in a byte, and the lines are padded to 16 elements."""


@dataclass(frozen=True)
class Table:
    """Rows on a device, and how many blocks of threads they take in each kernel that reads them."""

    rows: Tensor
    blocks: tuple[int, ...]

    def launch(self, kernel: CudaKernel, macros: tuple[str, ...] = (), which: int = 0) -> None:
        """Run a kernel over all rows; ``which`` is the place of its count in ``blocks``."""
        kernel.launch(self.rows.get_device(), macros, self.blocks[which], self.rows.data_ptr(), len(self.rows))


def fragment_table(fragments: Sequence[Fragment], block: Block, device: torch.device) -> Table:
    """Operands of one kind: one quantizer and one direction."""
    return _table([(f, f.blocks(block)) for f in fragments], device)


def sent_table(sent: Sequence[SentWords], device: torch.device) -> Table:
    """The table of the elements to send."""
    return _table([(t, (-(-t.words // WORDS),)) for t in sent], device)


def turned_table(turned: Sequence[Turned], device: torch.device) -> Table:
    """The table of the matrices to transpose."""
    return _table([(t, (-(-t.rows // SIDE) * -(-t.cols // SIDE),)) for t in turned], device)


def _table(entries: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], device: torch.device) -> Table:
    """Each row ends with its first block of threads in each kernel."""
    first = [0] * len(entries[0][1]) if entries else [0]
    rows: list[tuple[int, ...]] = []
    for row, blocks in entries:
        rows.append((*row, *first))
        first = [at + count for at, count in zip(first, blocks, strict=True)]
    return Table(_on_device(tuple(rows), device), tuple(first))


def _on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Rows in the memory of a device. A step whose memory lies where it lay in the last one copies nothing."""
    if captured(device):  # no graph may read what others may forget
        return on_device(rows, torch.int64, device)
    return _remembered(rows, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@lru_cache(maxsize=64)
def _remembered(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Rows that are copied without waiting: only launches on the same stream may read them."""
    return on_device(rows, torch.int64, device)
