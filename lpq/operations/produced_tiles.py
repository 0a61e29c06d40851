"""Kernels in CUDA C++ that encode, tile by tile, what a source computes.

They are one kernel, ``csrc/common/produce.cu``, compiled for a source and the formats of its outputs. No source and no
format has code for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import Allocate, Fresh, allocator, fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.table import lacking
from lpq.kernels.tiles import (
    INPUTS,
    SQUARE,
    ZERO,
    Launch,
    Shape,
    at_once,
    covering,
    divides,
    tiles,
)
from lpq.operations.binding import ALIGNED, Encoding
from lpq.operations.fused_pair import NOTHING, BoundSide, Made, Struct, TileSide, bind_sides, side_of
from lpq.operations.sides import shared
from lpq.operations.source import Source
from lpq.operations.states import Recall
from lpq.registry import KernelSpec

PIECE = 8
"""The elements that a thread reads at once: lines are multiples of it."""
SEARCHES = 4
"""Blocks of threads of a multiprocessor that search the amaxes."""


SPEC = KernelSpec.cuda("produce", "lpq.operations.produced_tiles:bind")
"""All sources have kernels of this kind, where they may run."""


class SourceOutput(NamedTuple):
    """How a kernel encodes one output; a side is None where that operand is not wanted."""

    e: Encoding
    row: Any
    col: Any
    """Each a ``TileSide``, or a ``TileProgram`` in Triton."""
    recall: Recall | None = None
    """Finds the statistics that it is given in all that is known; None: they are all that is known."""


class Produced(NamedTuple):
    """All that a kernel made of one output."""

    row: Sequence[Tensor]
    col: Sequence[Tensor]
    stats: Sequence[Tensor]
    value: Tensor | None
    """The matrix itself."""


Run = Callable[[Sequence[Tensor], Sequence[Any], Sequence[Tensor | None]], list[Produced]]
"""``run(inputs, known, seeds)``, with what is known and a seed of each output. The device is the current one."""


Values = Callable[..., Tensor]
"""``values(*inputs)``: what a source makes of them, as one matrix."""


def not_here(spec: KernelSpec, source: Source, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why kernels of one kind compute no elements of a source in this dtype here."""
    if (why := lacking(spec, device)) is not None:
        return f"the kernel of sources in {spec.backend} {why}"
    if dtype is torch.float32 and (source.outputs > 1 or source.inputs.count("matrix") > 1):
        return f"kernels compute elements in bfloat16 and float16 of several matrices, and not in {dtype}"
    return None


def why_not(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel computes a source's matrices of this kind; None: one does."""
    if not source.struct:
        return f"{source.name} has no kernel"
    if (why := not_here(SPEC, source, dtype, device)) is not None:
        return why
    if 0 in shape or shape[1] % PIECE:
        return f"lines of {shape[1]} elements are no multiple of {PIECE}, or there are none"
    return None


def operands(e: Encoding, recall: Recall | None = None) -> SourceOutput | str:
    """Describe how a kernel encodes one output, or why it does not."""

    def describe(quantizer: Quantizer, direction: Direction) -> TileSide | str:
        is_col = direction == "col"
        side = side_of(quantizer, direction, e.device, "exact_tile" if e.exact[is_col] else "tile")
        if isinstance(side, str) or side.find is None or side.lines:
            return side
        follows = is_col and shared(e.row, e.col)
        first = len(e.row.stats) if is_col and not follows and e.row is not None else 0
        if side.needs(bool(e.given) and e.given[first], e.measure and not follows):
            return f"{quantizer} needs statistics before the first element, and has no side that finds them"
        return side

    return source_output(e, recall, describe)


def source_output(
    e: Encoding, recall: Recall | None, describe: Callable[[Quantizer, Direction], Any]
) -> SourceOutput | str:
    """Describe an output by what ``describe`` returns of its operands; a text is the reason why one is not encoded."""
    sides: list[Any] = []
    for quantizer, direction in zip((e.row, e.col), get_args(Direction), strict=True):
        side = None if quantizer is None else describe(quantizer, direction)
        if isinstance(side, str):
            return side
        if side is not None and e.offset % side.aligned:
            return f"{quantizer} is not encoded from row {e.offset} of a tensor on"
        sides.append(side)
    return SourceOutput(e, sides[0], sides[1], recall)


NOTHING_MADE = Made((), (), (0,))
"""The parameters of ``NOTHING``."""
AMAX = Struct(csrc() / "common/amax.cuh", "Amax")


@cache
def _kernel(name: str, arguments: str, shape: Shape, staged: int) -> CudaKernel:
    """A kernel of a source whose blocks of threads share tiles, with ``staged`` bytes for each place in a tile."""
    elements = shape.tall * shape.wide
    return CudaKernel(
        "common/produce.cu", name, arguments, threads=elements // 64, shared=elements * staged, waits=True
    )


class _Kernels(NamedTuple):
    """The kernels of a source for matrices of one shape."""

    source: Source
    shape: tuple[int, int]
    dtype: torch.dtype
    device: int
    tile: Shape

    @property
    def blocks(self) -> int:
        return tiles(*self.shape, self.tile)

    def bind(self, name: str, structs: Sequence[Sequence[Struct]], outputs: str, stats: bool, blocks: int) -> Launch:
        """Bind a kernel that is compiled for the sides of the outputs; ``outputs``: the letters of its argument."""
        source, tile = self.source, self.tile
        headers = dict.fromkeys(struct.header for sides in structs for struct in sides)
        macros = (
            INPUTS[self.dtype], f"LPQ_SOURCE={source.struct}",
            "LPQ_SIDES=" + ",".join(f"Sides<{row.name},{col.name}>" for row, col in structs),
            *(f'LPQ_HEADER_{i}="{header}"' for i, header in enumerate(headers)),
            *(["LPQ_STATS"] if stats else []),
            *covering(tile, divides(*self.shape, tile)),
        )  # fmt: skip
        arguments = f"({'P' * len(source.inputs)})({outputs})Iqq"
        staged = max(source.inputs.count("matrix"), source.outputs) if name == "produce" else 0
        return _kernel(name, arguments, tile, staged * self.dtype.itemsize).bind(self.device, macros, blocks)

    @property
    def tail(self) -> tuple[int, int, int]:
        """The last arguments of each kernel."""
        return self.blocks, *self.shape

    def bind_run(self, structs: Sequence[Sequence[Struct]], stats: bool) -> Launch:
        """Bind a run through the sides."""
        letters = "".join(f"{row.parameters}{col.parameters}P" for row, col in structs)
        return self.bind("produce", structs, letters, stats, self.blocks)


SideStats = list[tuple[Tensor | None, Tensor | None]]
"""The statistics for the row operand and the column operand of each output, where they are needed."""


def _bind_search(
    kernels: _Kernels, bound: Sequence[Sequence[BoundSide | None]], empty: Allocate
) -> Callable[[Sequence[int]], SideStats] | None:
    """Bind a run that finds the statistics that sides need before the first element; None: none needs any."""
    takes = [(_takes_amax(row), _takes_amax(col)) for row, col in bound]
    places = [[_lines(row, kernels.shape[0]), _lines(col, kernels.shape[1])] for row, col in bound]
    tail = kernels.tail
    if not any(place is not None for each in places for place in each):
        if not any(True in both for both in takes):
            return None
        parts = at_once(kernels.blocks, SEARCHES, kernels.device)
        memory = fresh((parts,), torch.float32)
        search = kernels.bind("amaxes", [(NOTHING, NOTHING)] * len(takes), "P" * len(takes), False, parts)

        def find_amaxes(at: Sequence[int]) -> SideStats:
            statistics, addresses = list[tuple[Tensor | None, Tensor | None]](), [*at]
            for row, col in takes:
                amax = empty(*memory) if row or col else None
                statistics.append((amax if row else None, amax if col else None))
                addresses.append(0 if amax is None else amax.data_ptr())
            search(*addresses, *tail)
            return statistics

        return find_amaxes

    # The amax of an output has the place of the first side that needs it.
    value = fresh((), torch.float32)
    for place, both in zip(places, takes, strict=True):
        if True in both:
            place[both.index(True)] = AMAX, value
    run = kernels.bind_run([[NOTHING if p is None else p[0] for p in place] for place in places], False)
    counts = [[0 if p is None else math.prod(p[1][0]) for p in place] for place in places]
    clears = [
        ZERO.bind(kernels.device, (), -(-max(numbers) // ZERO.threads)) if any(numbers) else None for numbers in counts
    ]

    def find(at: Sequence[int]) -> SideStats:
        out: SideStats = []
        parameters = []
        for place, both, numbers, clear in zip(places, takes, counts, clears, strict=True):
            row, col = (None if p is None else empty(*p[1]) for p in place)
            pointers = 0 if row is None else row.data_ptr(), 0 if col is None else col.data_ptr()
            if clear is not None:
                clear(pointers[0], numbers[0], pointers[1], numbers[1])
            parameters += [*pointers, 0]
            out.append((row, row if both == (True, True) else col))
        run(*at, *parameters, *tail)
        return out

    return find


def _takes_amax(bound: BoundSide | None) -> bool:
    return bound is not None and bound.needs and bound.side.amax


def _lines(bound: BoundSide | None, count: int) -> tuple[Struct, Fresh] | None:
    """The side that finds the amaxes of an operand's lines, if it needs them, and the memory for ``count`` of them."""
    if bound is None or not bound.needs or not bound.side.lines:
        return None
    return Struct(bound.side.header, bound.side.lines), fresh((count, 1), torch.float32)


def bind(
    source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
    outputs: Sequence[SourceOutput | None], values: Sequence[bool],
) -> Run:  # fmt: skip
    """Bind one run that computes matrices and encodes them, after one that finds statistics, if any are needed.
    ``values``: which outputs are returned themselves, too."""
    sides_of_outputs = [(None, None) if o is None else (o.row, o.col) for o in outputs]
    tile = min([side.shape for sides in sides_of_outputs for side in sides if side is not None] + [SQUARE])
    kernels = _Kernels(source, shape, dtype, device.index or 0, tile)
    launch = kernels.bind_run(
        [[NOTHING if side is None else side.compiled for side in sides] for sides in sides_of_outputs],
        any(o is not None and (o.e.measure or True in o.e.given) for o in outputs),
    )
    bound = [(None, None) if o is None else bind_sides(*o[:3]) for o in outputs]
    each = [(*sides, None if o is None else o.recall, v) for sides, o, v in zip(bound, outputs, values, strict=True)]
    input_kinds = sizes_of_inputs(source, shape, dtype)
    empty, memory, tail = allocator(device), fresh(shape, dtype), kernels.tail
    zero = ZERO.bind(kernels.device, (), 1)
    find = _bind_search(kernels, bound, empty)
    nothing: SideStats = [(None, None)] * len(outputs)

    def run(inputs: Sequence[Tensor], stats: Sequence[Any], seeds: Sequence[Tensor | None]) -> list[Produced]:
        arguments: list[float] = []
        copies = []
        for i, (x, (count, x_dtype)) in enumerate(zip(inputs, input_kinds, strict=True)):
            if x.numel() != count or x.dtype is not x_dtype:
                raise unfit(source, i, x, count, x_dtype)
            address = x.data_ptr()
            if address % ALIGNED or not x.is_contiguous():
                copies += aligned(x)  # which lives until the launch
                address = copies[-1].data_ptr()
            arguments.append(address)
        before_stats = nothing if find is None else find(arguments)  # type: ignore[arg-type]
        zeros: list[int] = []
        out = []
        for (row, col, recall, returns_value), before, all_stats, seed in zip(
            each, before_stats, stats, seeds, strict=True
        ):
            own_stats = (all_stats if recall is None else recall(None, all_stats, None)) or ()
            of_row, of_col = NOTHING_MADE, NOTHING_MADE
            if row is not None:
                of_row = row.make(own_stats[row.stats] or row.none, before[0], seed, None)
            if col is not None:
                of_col = col.make(own_stats[col.stats] or col.none, before[1], seed, None)
            value = empty(*memory) if returns_value else None
            arguments += of_row.parameters
            arguments += of_col.parameters
            arguments.append(0 if value is None else value.data_ptr())
            zeros += [at for at in (of_row.zero, of_col.zero) if at]
            out.append(Produced(of_row.buffers, of_col.buffers, (*of_row.measured, *of_col.measured), value))
        while zeros:
            one = zeros.pop()
            zero(one, 1, zeros.pop() if zeros else one, 1)
        launch(*arguments, *tail)
        return out

    return run


def bind_halves(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Values:
    """As ``producer.bind_halves``, where kernels in CUDA C++ compute the source."""
    n_values = n_values_of_halves(source)
    of_halves = source._replace(struct=f"sources::Halves<{source.struct}>")
    kernels = _Kernels(of_halves, shape, dtype, device.index or 0, SQUARE)
    launch = kernels.bind_run([(NOTHING, NOTHING)] * source.outputs, False)
    (rows, cols), tail = shape, kernels.tail
    empty, memory, half = allocator(device), fresh((rows, n_values * cols), dtype), cols * dtype.itemsize

    def run(halves: Tensor, *others: Tensor) -> Tensor:
        halves, *others = aligned(halves, *others)  # type: ignore[assignment]
        y, at = empty(*memory), halves.data_ptr()
        values = [y.data_ptr() + i * half for i in range(n_values)] + [0] * (source.outputs - n_values)
        launch(at, at + half, *(x.data_ptr() for x in others), *(p for value in values for p in (0, 0, value)), *tail)
        return y

    return run


def n_values_of_halves(source: Source) -> int:
    """How many outputs of a gated source are wanted of halves: its product, or both gradients, and not what backward
    makes once more."""
    return max(source.outputs - 1, 1)


def sizes_of_inputs(source: Source, shape: tuple[int, int], dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """The number of elements of each input of a source whose outputs have this dtype, and their dtype."""
    sizes = {"matrix": (math.prod(shape), dtype), "row": (shape[0], torch.float32), "col": (shape[1], dtype)}
    return [sizes[kind] for kind in source.inputs]


def unfit(source: Source, i: int, x: Tensor, count: int, dtype: torch.dtype) -> ValueError:
    """An input that a kernel would read wrongly."""
    return ValueError(
        f"{source.name}: input {i} has {x.numel()} elements in {x.dtype}, and not {count} in {dtype}: give what this "
        "producer was bound for, or bind another one"
    )


def aligned(*matrices: Tensor) -> list[Tensor]:
    """The same numbers, contiguous from a multiple of ``ALIGNED`` bytes on."""
    same = [x.contiguous() for x in matrices]
    return [x if x.data_ptr() % ALIGNED == 0 else x.clone() for x in same]
