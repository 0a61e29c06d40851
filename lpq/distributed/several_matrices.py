"""Several matrices of any shapes, which are measured by one launch, or whose row operands are encoded by one.

Each matrix is the shard of a weight in fp32. Launches are bound to addresses: shards and statistics stay where they are
from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import Block, Stat
from lpq.kernels import KernelError, amaxes, choose
from lpq.kernels.amaxes import bind_amaxes
from lpq.kernels.host_to_device import captured
from lpq.kernels.launch_table import TableLaunch
from lpq.kernels.table import kernels_allowed, serves
from lpq.operations.binding import EncodeSeveral
from lpq.operations.kernel_protocols import BindSeveral
from lpq.operations.reduce_statistics import spans
from lpq.torch_private import cuda

WORD = 4
"""Bytes of a statistic."""
ALIGNED = 16
"""The alignment, in bytes, of each buffer."""
MOST = 64
"""Sets of matrices whose statistics are bound."""
OF: dict[Block, bool] = {(None, None): False, (None, 1): True}
"""The blocks of a matrix that the kernel measures, and whether they are its columns."""
Shape = tuple[int, int]


def spanning(side: Quantizer, direction: Direction) -> list[Stat]:
    """The statistics of an operand that reach beyond the shards of a weight, or cover all of a matrix."""
    return [stat for stat in side.stats if spans((stat, int(direction == "col")))]


def measured_together(side: Quantizer, direction: Direction, held: torch.dtype, device: torch.device) -> bool:
    """Whether one launch measures all statistics of several matrices that reach beyond these."""
    stats = spanning(side, direction)
    if len(stats) > 1 or not all(stat.largest and _of_matrix(stat, direction) in OF for stat in stats):
        return False
    return held is torch.float32 and serves(amaxes.SPEC, device)


def _of_matrix(stat: Stat, direction: Direction) -> Block:
    """The block of the matrix that one value covers."""
    down, across = stat.block
    return (down, across) if direction == "row" else (across, down)


def several_of(side: Quantizer, device: torch.device) -> BindSeveral[Quantizer] | None:
    """The function of a format that binds an encoding of several row operands, if it has one."""
    return None if side.plain else _several_of(side, device, kernels_allowed())


@registry.cached
def _several_of(side: Quantizer, device: torch.device, kernels: object) -> BindSeveral[Quantizer] | None:
    try:
        return choose("quantize", (side.text,), device).several
    except KernelError:  # the reference is not allowed: the other way raises with what each operation lacks
        return None


class ShardStatistics:
    """The statistic of several matrices that reaches beyond the shards of a weight, or covers all of a matrix. They lie
    in one tensor, ``all``, which each measurement writes over."""

    def __init__(
        self, side: Quantizer, direction: Direction, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it."""
        (stat,) = spanning(side, direction)
        self._columns, self._dtype = OF[_of_matrix(stat, direction)], dtype
        self._shapes, self._device = shapes, device
        grids = [stat.grid(*(shape if direction == "row" else shape[::-1])) for shape in shapes]
        self._first = [*accumulate(map(math.prod, grids), initial=0)]
        self.all = torch.zeros(self._first[-1], dtype=torch.float32, device=device)
        self.stats: list[list[Tensor | None]] = []
        """The statistics of each matrix, in the order of the quantizer's; None: it is one of a shard alone."""
        for grid, first in zip(grids, self._first, strict=False):
            view = self.all[first : first + math.prod(grid)].view(grid)
            self.stats.append([view if each == stat else None for each in side.stats])
        self._bound: tuple[list[int], TableLaunch] | None = None

    def measure(self, xs: Sequence[Tensor]) -> None:
        """Measure these matrices, which are contiguous."""
        pointers, bound = [x.data_ptr() for x in xs], self._bound
        if bound is None or bound[0] != pointers:
            found = [self.all.data_ptr() + first * WORD for first in self._first[:-1]]
            matrices = list(zip(pointers, found, self._shapes, strict=True))
            bound = pointers, bind_amaxes(matrices, self._columns, self._dtype, self._device)
            if not captured(self._device):  # a recorded table is there when its graph is replayed
                self._bound = bound
        self.all.zero_()
        bound[1].run()


class Measuring:
    """The statistics of shards that are measured together, each bound once."""

    def __init__(self) -> None:
        self._bound: dict[tuple[object, ...], ShardStatistics] = {}

    def measure(
        self,
        side: Quantizer,
        direction: Direction,
        xs: Sequence[Tensor],
        dtype: torch.dtype,
        owners: tuple[object, ...],
    ) -> ShardStatistics:
        """Measure these matrices. The same ``owners`` get the same tensors each time, with other values."""
        key = side, direction, dtype, tuple(owners)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= MOST:
                self._bound.clear()
            shapes = [(x.shape[0], x.shape[1]) for x in xs]
            bound = self._bound[key] = ShardStatistics(side, direction, shapes, dtype, xs[0].device)
        bound.measure(xs)
        return bound


class BoundRows(NamedTuple):
    """The row operands of several matrices and statistics at some places in memory, and the launch that makes them."""

    pointers: list[int]
    launch: TableLaunch
    buffers: list[list[Tensor]]
    """The buffers of each operand. All are contiguous."""
    staying: list[Tensor]
    """Buffers that are the same for all shards of a weight; they lie in memory of their own."""
    spread: list[Tensor]
    """The bytes of the others."""
    flat: Tensor
    """All buffers, one behind the other, with padding."""


class RowOperands:
    """The row operand of each of several matrices, whose statistics are given. Each stream has one memory, which a
    later encoding on the same stream writes over."""

    def __init__(
        self, side: Quantizer, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, encode: EncodeSeveral
    ) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it."""
        self._encode, self._device, self._count = encode, device, len(side.stats)
        self._own: list[list[Tensor | None]] = []
        self._made: list[list[tuple[int, torch.dtype, torch.Size]]] = []
        """The bytes, the dtype and the shape of each buffer."""
        meta = torch.device("meta")
        for shape in shapes:
            tensors = side.storage.empty(side, shape, dtype, meta).tensors()
            stays = [buffer.unit(0) is None for buffer in side.layout]
            self._own.append(
                [t.new_empty(t.shape, device=device) if s else None for t, s in zip(tensors, stays, strict=True)]
            )
            self._made.append([(t.nbytes, t.dtype, t.shape) for t in tensors])
        sizes = [
            0 if own is not None else -(-size // ALIGNED) * ALIGNED
            for owns, made in zip(self._own, self._made, strict=True)
            for own, (size, *_) in zip(owns, made, strict=True)
        ]
        *places, self._size = accumulate(sizes, initial=0)
        count = len(side.layout)
        self._places = [places[i : i + count] for i in range(0, len(places), count)]
        self.sizes = [n for n, own in zip(sizes, (o for owns in self._own for o in owns), strict=True) if own is None]
        """The bytes of each buffer that is not the same for all shards of a weight, with padding."""
        self._bound: dict[int, BoundRows] = {}
        self._encoded: dict[int, tuple[BoundRows, Sequence[object]]] = {}
        """The last encoding on each stream, with its ``versions``."""

    def encode(
        self, xs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], versions: Sequence[object] = ()
    ) -> BoundRows:
        """Encode these matrices. ``stats``: the statistics of each matrix; it begins with all those that its quantizer
        declares. ``versions``: an object for each matrix, which is replaced once the values or the statistics of the
        matrix may have changed. If they are unchanged, return what the last call on this stream encoded."""
        stream = cuda.current_stream(self._device.index) if self._device.type == "cuda" else 0
        pointers, count = [x.data_ptr() for x in xs], self._count
        pointers += [stat.data_ptr() for of_one in stats for stat in of_one[:count] if stat is not None]
        bound = self._bound.get(stream)
        if bound is None or bound.pointers != pointers:
            bound = self._bind(pointers)
            if not captured(self._device):
                self._bound[stream] = bound
        last = self._encoded.get(stream)
        if last is not None and last[0] is bound and versions and last[1] == versions and not captured(self._device):
            return bound  # a recorded graph, which is replayed with other values, encodes them
        bound.launch.run()
        self._encoded[stream] = bound, versions
        return bound

    def _bind(self, pointers: list[int]) -> BoundRows:
        memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        buffers: list[list[Tensor]] = []
        staying: list[Tensor] = []
        spread: list[Tensor] = []
        for owns, made, places in zip(self._own, self._made, self._places, strict=True):
            buffers.append([])
            for own, (size, dtype, shape), at in zip(owns, made, places, strict=True):
                part = memory[at : at + size]
                (spread if own is None else staying).append(part if own is None else own)
                buffers[-1].append(part.view(dtype).view(shape) if own is None else own)
        count = len(buffers)
        stats = [pointers[at : at + self._count] for at in range(count, len(pointers), self._count)]
        launch = self._encode(pointers[:count], stats, [[t.data_ptr() for t in each] for each in buffers])
        return BoundRows(pointers, launch, buffers, staying, spread, memory)


def bind_rows(side: Quantizer, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> RowOperands | None:
    """Bind the encoding of the row operands of several matrices, if their format encodes several in one launch."""
    bind = several_of(side, device)
    encode = bind(side, shapes, dtype, device) if bind is not None else None
    return RowOperands(side, shapes, dtype, device, encode) if encode is not None else None
