"""Several matrices of any shapes, which are measured or encoded by one launch for each step.

The kernels are those that cast fragments of master weights (``lpq/kernels/fragments.py``). Here each matrix is the
shard of a weight in fp32, and one fragment, which is whole. Launches are bound to addresses: shards and statistics stay
where they are from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.casting.batched import CODES, MEASURE, SCALES, WORD, kernels_of
from lpq.distributed.casting.fragments import Grid
from lpq.distributed.casting.kinds import in_fragments
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.sections import along
from lpq.kernels.fragments import CastKernels, Fragment, fragment_table
from lpq.kernels.host_to_device import captured
from lpq.kernels.table import kernels_allowed
from lpq.torch_private import cuda

ALIGNED = 16
"""Each buffer begins at a multiple of so many bytes."""
MOST = 64
"""Sets of matrices whose statistics are bound."""
Shape = tuple[int, int]


def measured_together(side: Quantizer, held: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel measures several matrices for this quantizer in one launch."""
    return held is torch.float32 and _served(side, device, kernels_allowed())


@registry.cached
def _served(side: Quantizer, device: torch.device, kernels: object) -> bool:
    return not side.plain and in_fragments(side) and kernels_of(side, device) is not None


def encoded_together(
    side: Quantizer, direction: Direction, given: Sequence[bool], held: torch.dtype, device: torch.device
) -> bool:
    """Whether kernels encode several matrices by this quantizer as fast as its own kernel encodes each: they read
    a matrix again to measure it, and write a column operand twice.

    ``given``: for each statistic of the quantizer, whether it is given."""
    return direction == "row" and all(given) and measured_together(side, held, device)


class ShardStatistics:
    """The statistics of several matrices that reach beyond the shards of a weight, or cover all of a matrix. They lie
    in one tensor, ``all``, which each measurement writes over."""

    def __init__(
        self, side: Quantizer, direction: Direction, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it."""
        kernels, col = kernels_of(side, device), direction == "col"
        assert kernels is not None
        down, across = side.stats[-1].block
        self._block = (across, down) if col else (down, across)
        self._kernel, self._macros = kernels.measure, kernels.compiled_for(self._block, col=col, dtype=dtype)
        self._shapes, self._device = shapes, device
        spread = [stat.unit(int(col)) is not None for stat in side.stats]
        grids = [Grid(side.stats[-1], direction, *shape) for shape in shapes]
        # The amax of each matrix is first if its blocks have amaxes beside it, which are of no use then.
        self._first = [*accumulate((grid.count for grid in grids), initial=len(shapes) if len(spread) > 1 else 0)]
        memory = torch.zeros(self._first[-1], dtype=torch.float32, device=device)
        self._memory, self.all = memory, memory[: self._first[0]] if spread[-1] else memory
        self.stats: list[list[Tensor | None]] = []
        """The statistics of each matrix, in the order of the quantizer's; None: it is one of a shard alone."""
        for i, shape in enumerate(shapes):
            size = along(direction, shape)
            views = [memory[i], memory[self._first[i] : self._first[i + 1]]][-len(spread) :]
            self.stats.append(
                [
                    None if s else view.view(stat.grid(*size))
                    for s, stat, view in zip(spread, side.stats, views, strict=True)
                ]
            )
        self._bound: tuple[list[int], Tensor, Callable[[], None]] | None = None

    def measure(self, xs: Sequence[Tensor]) -> None:
        """Measure these matrices, which are contiguous."""
        pointers, bound = [x.data_ptr() for x in xs], self._bound
        if bound is None or bound[0] != pointers:
            at = self._memory.data_ptr()
            rows = [
                _fragment(x, shape, amaxes=at + self._first[i] * WORD, overall=at + i * WORD)
                for i, (x, shape) in enumerate(zip(pointers, self._shapes, strict=True))
            ]
            table = fragment_table(rows, self._block, self._device)
            launch = self._kernel.bind(self._device.index or 0, self._macros, table.blocks[MEASURE])
            bound = pointers, table.rows, partial(launch, table.rows.data_ptr(), len(rows))
            if not captured(self._device):  # a recorded table is there when its graph is replayed
                self._bound = bound
        self._memory.zero_()
        bound[2]()


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
    """The row operands of several matrices and statistics at some places in memory, and the launches that make them."""

    pointers: list[int]
    table: Tensor
    launches: Sequence[Callable[[], None]]
    buffers: list[list[Tensor]]
    """The buffers of each operand. All are contiguous."""
    staying: list[Tensor]
    """Those that are the same for all shards of a weight; they lie in memory of their own."""
    spread: list[Tensor]
    """The bytes of the others."""
    flat: Tensor
    """All of these, one behind the other, with padding."""


class RowOperands:
    """The row operand of each of several matrices, whose statistics are given. Each stream has one memory, which a
    later encoding on the same stream writes over."""

    def __init__(self, side: Quantizer, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: elements, which are in fp32, are rounded to it."""
        kernels = kernels_of(side, device)
        assert kernels is not None
        self._kernels: CastKernels = kernels
        self._shapes, self._device, self._block = shapes, device, side.stats[-1].block
        self._macros = kernels.compiled_for(self._block, col=False, dtype=dtype)
        self._count = len(side.stats)
        (codes,) = (buffer for buffer in side.layout if not buffer.from_stats)
        self._codes = [Grid(codes, "row", *shape) for shape in shapes]
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
        self._first = [*accumulate((Grid(side.stats[-1], "row", *shape).count for shape in shapes), initial=0)]
        self._factors = torch.empty(self._first[-1], dtype=torch.float32, device=device)
        self._bound: dict[int, BoundRows] = {}
        self._encoded: dict[int, tuple[BoundRows, Sequence[object]]] = {}
        """The last encoding on each stream, with its ``versions``."""

    def encode(
        self, xs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], versions: Sequence[object] = ()
    ) -> BoundRows:
        """Encode these matrices; ``stats``: for each matrix first those of the quantizer, none of which is None.
        ``versions``: an object for each matrix that is another one once its values or its statistics may be others.
        What the last call on this stream encoded is returned again if these are the same."""
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
        for launch in bound.launches:
            launch()
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
        count = len(self._shapes)
        rows = [
            self._row(i, pointers[i], pointers[count + i * self._count : count + (i + 1) * self._count], buffers[i])
            for i in range(count)
        ]
        table = fragment_table(rows, self._block, self._device)
        launches = [
            partial(
                kernel.bind(self._device.index or 0, self._macros, table.blocks[which]), table.rows.data_ptr(), count
            )
            for kernel, which in ((self._kernels.scales, SCALES), (self._kernels.codes, CODES))
        ]
        return BoundRows(pointers, table.rows, launches, buffers, staying, spread, memory)

    def _row(self, i: int, values: int, stats: Sequence[int], buffers: Sequence[Tensor]) -> Fragment:
        """The row of a table for one matrix."""
        codes, scales, *kept = buffers
        return _fragment(
            values,
            self._shapes[i],
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            kept=kept[0].data_ptr() if kept else 0,
            used_amaxes=stats[-1],
            used_overall=stats[0],
            factors=self._factors.data_ptr() + self._first[i] * WORD,
            codes_stop=self._codes[i].count,
            width=self._codes[i].shape[1],
        )


def _fragment(values: int, shape: Shape, **others: int) -> Fragment:
    """The row of a table for a whole matrix; all fields that are not given are 0."""
    rows, cols = shape
    fields = {**dict.fromkeys(Fragment._fields, 0), "ranks": 1, "stop": rows * cols, **others}
    return Fragment(**{**fields, "values": values, "rows": rows, "cols": cols})
