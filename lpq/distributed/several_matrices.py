"""Several matrices of any shapes, which are measured by one launch, or of which an operand is encoded by one.

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

from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import Block, Stat
from lpq.kernels import KernelError, amaxes, choose
from lpq.kernels.amaxes import bind_amaxes
from lpq.kernels.host_to_device import captured
from lpq.kernels.launch_table import TableLaunch
from lpq.kernels.table import bound_once, serves
from lpq.operations.binding import EncodeSeveral
from lpq.operations.fused_pair import TileSide
from lpq.operations.kernel_protocols import BindSeveral
from lpq.operations.reduce_statistics import spans
from lpq.operations.several_sides import bind_side, several_side
from lpq.torch_private import cuda

WORD = 4
"""Bytes of a statistic."""
ALIGNED = 16
"""The alignment, in bytes, of each buffer."""
MOST = 64
"""Sets of matrices whose statistics are bound."""
OF: dict[Block, amaxes.Of] = {(None, None): "matrix", (None, 1): "column", (1, None): "row"}
"""The blocks of a matrix that the kernel measures."""
Shape = tuple[int, int]


def spanning(side: Quantizer, direction: Direction) -> list[Stat]:
    """The statistics of an operand that reach beyond the shards of a weight, or cover all of a matrix."""
    return [stat for stat in side.stats if spans((stat, int(direction == "col")))]


def can_measure_together(side: Quantizer, direction: Direction, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one launch measures all statistics of several matrices that reach beyond these."""
    stats = spanning(side, direction)
    if len(stats) > 1 or not all(stat.largest and _of_matrix(stat, direction) in OF for stat in stats):
        return False
    return dtype is torch.float32 and serves(amaxes.SPEC, device)


def _of_matrix(stat: Stat, direction: Direction) -> Block:
    """The block of the matrix that one value covers."""
    down, across = stat.block
    return (down, across) if direction == "row" else (across, down)


class SentOperand(NamedTuple):
    """An operand that is encoded from shards."""

    side: Quantizer
    direction: Direction
    first: int
    """The number of its first statistic among all that a weight has."""
    has_stats: tuple[bool, ...]
    """For each of its statistics, whether it is known before."""


def encodes_several(operand: SentOperand, device: torch.device) -> bool:
    """Whether one launch may encode this operand of several matrices."""
    if operand.side.plain:
        return False
    return _own_kernel(operand, device) is not None or _tiled(operand, device) is not None


def _own_kernel(operand: SentOperand, device: torch.device) -> BindSeveral[Quantizer] | None:
    """The function of a format that binds an encoding of several row operands, if it has one that may serve."""
    if operand.direction == "col" or not operand.has_stats or not all(operand.has_stats):
        return None
    return _several_of(operand.side, device)


def _tiled(operand: SentOperand, device: torch.device) -> TileSide | None:
    """How the operand is made tile by tile, if that needs no statistic but what is given, or amaxes of rows."""
    tile = _side_of(operand.side, operand.direction, device)
    if tile is None or True in operand.has_stats[1:]:
        return None
    has_all = (True in operand.has_stats) == tile.needs(given=False, measure=False)
    return tile if has_all or _measures_lines(operand, device) else None


def _measures_lines(operand: SentOperand, device: torch.device) -> bool:
    """Whether the operand needs the amaxes of rows of the matrix, which are not given."""
    if not operand.has_stats or True in operand.has_stats or not serves(amaxes.SPEC, device):
        return False
    first, *_ = operand.side.stats
    return first.largest and _of_matrix(first, operand.direction) == (1, None)


_side_of = bound_once(several_side)


@bound_once
def _several_of(side: Quantizer, device: torch.device) -> BindSeveral[Quantizer] | None:
    try:
        return choose("quantize", (side.text,), device).several
    except KernelError:  # the reference is not allowed: the other way raises with what each operation lacks
        return None


class ShardStatistics:
    """A statistic of several matrices. Its values lie in one tensor, ``all``, which each measurement writes over."""

    def __init__(
        self,
        side: Quantizer,
        direction: Direction,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        device: torch.device,
        stat: Stat | None = None,
    ) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it. ``stat``: the measured statistic; None: the one
        that reaches beyond the shards of a weight, or covers all of a matrix."""
        if stat is None:
            (stat,) = spanning(side, direction)
        self._of, self._dtype = OF[_of_matrix(stat, direction)], dtype
        self._shapes, self._device = shapes, device
        grids = [stat.grid(*(shape if direction == "row" else shape[::-1])) for shape in shapes]
        self._first = [*accumulate(map(math.prod, grids), initial=0)]
        self.all = torch.zeros(self._first[-1], dtype=torch.float32, device=device)
        self.stats: list[Sequence[Tensor | None]] = []
        """The statistics of each matrix, in the order of the quantizer's; None: it is one of a shard alone."""
        for grid, first in zip(grids, self._first, strict=False):
            view = self.all[first : first + math.prod(grid)].view(grid)
            self.stats.append([view if each == stat else None for each in side.stats])
        self._bound: tuple[list[int], TableLaunch] | None = None

    def measure(self, xs: Sequence[Tensor]) -> None:
        """Measure these matrices, which are contiguous."""
        pointers, bound = [x.data_ptr() for x in xs], self._bound
        if bound is None or bound[0] != pointers:
            addresses = [self.all.data_ptr() + first * WORD for first in self._first[:-1]]
            matrices = list(zip(pointers, addresses, self._shapes, strict=True))
            bound = pointers, bind_amaxes(matrices, self._of, self._dtype, self._device)
            if not captured(self._device):  # a recorded table is there when its graph is replayed
                self._bound = bound
        self.all.zero_()
        bound[1].run()


Measurements = dict[tuple[object, ...], ShardStatistics]
"""Statistics of shards that were measured together, by all that their launches are bound to."""


def measure_together(
    bound: Measurements, side: Quantizer, direction: Direction, xs: Sequence[Tensor], dtype: torch.dtype,
    owners: tuple[object, ...],
) -> ShardStatistics:  # fmt: skip
    """Measure these matrices. The same ``owners`` get the same tensors each time, with other values."""
    key = side, direction, dtype, owners
    if (statistics := bound.get(key)) is None:
        if len(bound) >= MOST:
            bound.clear()
        shapes = [(x.shape[0], x.shape[1]) for x in xs]
        statistics = bound[key] = ShardStatistics(side, direction, shapes, dtype, xs[0].device)
    statistics.measure(xs)
    return statistics


class Scratch:
    """Memory of each stream for operands that are sent and then forgotten: the next encoding on it writes over them."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def of(self, stream: int, size: int, device: torch.device) -> Tensor:
        """At least ``size`` bytes, the same memory until more is needed."""
        memory = self._of.get(stream)
        if memory is None or len(memory) < size or memory.device != device:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            if not captured(device):
                self._of[stream] = memory
        return memory


class BoundOperands(NamedTuple):
    """An operand of several matrices and statistics at some places in memory, and the launch that makes it."""

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
    memory: Tensor
    """The memory that they begin."""


class ShardOperands:
    """One operand of each of several matrices. Each stream has one memory, which a later encoding on the same stream
    writes over."""

    def __init__(
        self,
        side: Quantizer,
        direction: Direction,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        device: torch.device,
        encode: EncodeSeveral,
        first: int = 0,
        lines: ShardStatistics | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it. ``first``: the number of its first statistic among
        the statistics of a matrix. ``lines``: measures the first statistic, which is
        not given. ``scratch``: memory that others write over; None: memory of its own."""
        self.direction = direction
        self._encode, self._device, self._stats = encode, device, slice(first, first + len(side.stats))
        self._lines, self._scratch = lines, scratch
        dim = 0 if direction == "row" else 1
        self._own: list[list[Tensor | None]] = []
        self._forms: list[list[tuple[int, torch.dtype, torch.Size]]] = []
        """The bytes, the dtype and the shape of each buffer."""
        meta = torch.device("meta")
        for shape in shapes:
            tensors = side.storage.empty(side, shape if dim == 0 else shape[::-1], dtype, meta).tensors()
            stays = [buffer.unit(dim) is None for buffer in side.layout]
            self._own.append(
                [t.new_empty(t.shape, device=device) if s else None for t, s in zip(tensors, stays, strict=True)]
            )
            self._forms.append([(t.nbytes, t.dtype, t.shape) for t in tensors])
        sizes = [
            0 if own is not None else -(-size // ALIGNED) * ALIGNED
            for owns, forms in zip(self._own, self._forms, strict=True)
            for own, (size, *_) in zip(owns, forms, strict=True)
        ]
        *places, self._size = accumulate(sizes, initial=0)
        count = len(side.layout)
        self._places = [places[i : i + count] for i in range(0, len(places), count)]
        self.sizes = [n for n, own in zip(sizes, (o for owns in self._own for o in owns), strict=True) if own is None]
        """The bytes of each buffer that is not the same for all shards of a weight, with padding."""
        self._bound: dict[int, BoundOperands] = {}
        self._encoded: dict[int, tuple[BoundOperands, Sequence[object]]] = {}
        """The last encoding on each stream, with its ``versions``."""

    def encode(
        self, xs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], versions: Sequence[object] = ()
    ) -> BoundOperands:
        """Encode these matrices. ``stats``: the statistics of each matrix, among them all that its quantizer declares.
        ``versions``: an object for each matrix, which is replaced once the values or the statistics of the matrix may
        have changed. If they are unchanged, return what the last call on this stream encoded, unless it lies in a
        ``scratch``."""
        stream = cuda.current_stream(self._device.index) if self._device.type == "cuda" else 0
        if self._lines is not None:
            self._lines.measure(xs)
        own_stats = [of_one[self._stats] for of_one in stats] if self._lines is None else self._lines.stats
        pointers, scratch = [x.data_ptr() for x in xs], self._scratch
        pointers += [stat.data_ptr() for of_one in own_stats for stat in of_one if stat is not None]
        memory = scratch.of(stream, self._size, self._device) if scratch is not None else None
        bound = self._bound.get(stream)
        if bound is None or bound.pointers != pointers or (memory is not None and bound.memory is not memory):
            bound = self._bind(pointers, xs, own_stats, memory)
            if not captured(self._device):
                self._bound[stream] = bound
        if scratch is not None:
            bound.launch.run()
            return bound
        last = self._encoded.get(stream)
        if last is not None and last[0] is bound and versions and last[1] == versions and not captured(self._device):
            return bound  # a recorded graph, which is replayed with other values, encodes them
        bound.launch.run()
        self._encoded[stream] = bound, versions
        return bound

    def _bind(
        self,
        pointers: list[int],
        xs: Sequence[Tensor],
        stats: Sequence[Sequence[Tensor | None]],
        memory: Tensor | None,
    ) -> BoundOperands:
        if memory is None:
            memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        buffers: list[list[Tensor]] = []
        staying: list[Tensor] = []
        spread: list[Tensor] = []
        for owns, forms, places in zip(self._own, self._forms, self._places, strict=True):
            buffers.append([])
            for own, (size, dtype, shape), at in zip(owns, forms, places, strict=True):
                part = memory[at : at + size]
                (spread if own is None else staying).append(part if own is None else own)
                buffers[-1].append(part.view(dtype).view(shape) if own is None else own)
        launch = self._encode(xs, stats, buffers)
        return BoundOperands(pointers, launch, buffers, staying, spread, memory[: self._size], memory)


def bind_operands(
    operand: SentOperand, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, scratch: Scratch | None
) -> ShardOperands | None:
    """Bind the encoding of an operand of several matrices in one launch: by the kernel that its format has for that, or
    else tile by tile. None: each is encoded by itself."""
    side, direction, first, flags = operand
    own, lines = _own_kernel(operand, device), None
    encode = own(side, shapes, dtype, device) if own is not None else None
    if encode is None:
        tile = _tiled(operand, device)
        if tile is None:
            return None
        encode = bind_side(tile, direction, shapes, dtype, device)
        if tile.needs(True in flags, measure=False):
            lines = ShardStatistics(side, direction, shapes, dtype, device, side.stats[0])
    return ShardOperands(side, direction, shapes, dtype, device, encode, first, lines, scratch)
