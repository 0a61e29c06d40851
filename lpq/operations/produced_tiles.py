"""Kernels that encode, tile by tile, what a source computes.

They are one kernel, ``csrc/common/produce.cu``, compiled for a source and the formats of its outputs. No source and no
format has code for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import INPUTS, SQUARE, Shape, at_once, covering, divides, tiles
from lpq.operations.binding import ALIGNED, Encoding
from lpq.operations.fused_pair import Job, Make, TileSide, side_of
from lpq.operations.sides import shared
from lpq.operations.source import Source

if TYPE_CHECKING:
    from lpq.formats.format import Direction

NOTHING = csrc() / "common/nothing.cuh"
PIECE = 8
"""The elements that a thread reads at once: lines are multiples of it."""
SEARCHES = 4
"""Blocks of threads of a multiprocessor that search the amaxes."""


class TiledOutput(NamedTuple):
    """How a kernel encodes one output; a side is None where that operand is not wanted."""

    e: Encoding
    row: TileSide | None
    col: TileSide | None


class Produced(NamedTuple):
    """All that a kernel made of one output."""

    row: Sequence[Tensor]
    col: Sequence[Tensor]
    stats: Sequence[Tensor]
    value: Tensor | None


Run = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor | None]], Sequence[Tensor | None]], list[Produced]]
"""``run(inputs, stats, seeds)``, with the given statistics and the seed of each output."""


def why_not(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel computes a source's matrices of this kind; None: one does."""
    if not source.struct:
        return f"{source.name} has no kernel"
    if device.type != "cuda":
        return f"there are no such kernels for {device.type}"
    if dtype.itemsize != 2:
        return f"a source is computed by kernels in bfloat16 and float16, and not in {dtype}"
    if 0 in shape or shape[1] % PIECE:
        return f"lines of {shape[1]} elements are no multiple of {PIECE}, or there are none"
    return None


def operands(e: Encoding) -> TiledOutput | str:
    """Describe how a kernel encodes one output, or why it does not."""
    both = shared(e.row, e.col)
    count = len(e.row.stats) if e.row is not None else 0
    given = e.given or (False,) * (count + (len(e.col.stats) if e.col is not None else 0))
    sides: list[TileSide | None] = []
    for quantizer, direction, exact, first in ((e.row, "row", e.exact[0], 0), (e.col, "col", e.exact[1], count)):
        if quantizer is None:
            sides.append(None)
            continue
        side = side_of(quantizer, cast("Direction", direction), e.device, "exact_tile" if exact else "tile")
        if isinstance(side, str):
            return side
        if e.offset % side.aligned:
            return f"{quantizer} is not encoded from row {e.offset} of a tensor on"
        follows = both and direction == "col"
        at = 0 if follows else first
        if side.find is not None and side.needs(bool(given) and given[at], e.measure and not follows):
            return f"{quantizer} needs statistics of whole lines, or of what is rotated, before the first element"
        sides.append(side)
    return TiledOutput(e, sides[0], sides[1])


class _Side(NamedTuple):
    """One operand of one output, bound."""

    make: Make
    stats: slice
    """Its statistics among those of the output."""
    amax: bool
    """Whether it needs the amax of the output."""


def _bind_sides(o: TiledOutput) -> list[_Side | None]:
    """Bind the allocation of the operands of an output. A column operand that follows from the row operand has its
    statistics and measures none."""
    e, (rows, cols) = o.e, o.e.shape
    count = len(e.row.stats) if e.row is not None else 0
    follows, given = shared(e.row, e.col), e.given
    out: list[_Side | None] = []
    for i, (side, quantizer) in enumerate(((o.row, e.row), (o.col, e.col))):
        if side is None:
            out.append(None)
            continue
        measure = e.measure and not (follows and i == 1)
        shape, first = ((cols, rows), 0 if follows else count) if i == 1 else ((rows, cols), 0)
        job = Job(shape, e.held, e.device, e.offset, measure, e.dispatched)
        stats = slice(first, first + len(quantizer.stats))
        needs = side.amax and side.needs(bool(given) and given[first], measure)
        out.append(_Side(side.bind(job), stats, needs))
    return out


@cache
def _kernel(name: str, arguments: str, shape: Shape, staged: int) -> CudaKernel:
    """A kernel of a source whose blocks of threads share so many tiles of 16-bit elements."""
    elements = shape.tall * shape.wide
    return CudaKernel(
        "common/produce.cu", name, arguments, threads=elements // 64, shared=2 * elements * staged, waits=True
    )


def bind(
    source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
    outputs: Sequence[TiledOutput | None], values: Sequence[bool],
) -> Run:  # fmt: skip
    """Bind one run that computes matrices and encodes them, after one that finds their amaxes, if they are needed.
    ``values``: which outputs are returned themselves, too."""
    (rows, cols), index = shape, device.index or 0
    wanted = [(None, None) if o is None else (o.row, o.col) for o in outputs]
    tile = min([side.shape for sides in wanted for side in sides if side is not None] + [SQUARE])
    blocks, letters = tiles(rows, cols, tile), "P" * len(source.inputs)
    headers = list(dict.fromkeys(NOTHING if side is None else side.header for sides in wanted for side in sides))
    structs = [["Nothing" if side is None else side.struct for side in sides] for sides in wanted]
    macros = (
        INPUTS[dtype], f"LPQ_SOURCE={source.struct}",
        "LPQ_SIDES=" + ",".join(f"Sides<{row},{col}>" for row, col in structs),
        *(f'LPQ_HEADER_{i}="{header}"' for i, header in enumerate(headers)),
        *(["LPQ_STATS"] if any(o is not None and (o.e.measure or True in o.e.given) for o in outputs) else []),
        *covering(tile, divides(rows, cols, tile)),
    )  # fmt: skip
    of_sides = ("".join("P" if side is None else side.parameters for side in sides) for sides in wanted)
    arguments = f"({letters})({''.join(f'{of}P' for of in of_sides)})Iqq"
    launch = _kernel("produce", arguments, tile, max(source.inputs.count("matrix"), source.outputs)).bind(
        index, macros, blocks
    )
    bound = [[None, None] if o is None else _bind_sides(o) for o in outputs]
    searched = [any(side is not None and side.amax for side in sides) for sides in bound]
    empty, memory, tail = allocator(device), fresh(shape, dtype), (blocks, rows, cols)
    parts = at_once(blocks, SEARCHES, index)
    found_in = fresh((parts,), torch.float32)
    search = None
    if True in searched:
        search = _kernel("amaxes", f"({letters})({'P' * source.outputs})Iqq", tile, 0).bind(index, macros, parts)

    def run(
        inputs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], seeds: Sequence[Tensor | None]
    ) -> list[Produced]:
        inputs = [aligned(x) for x in inputs]
        at = [x.data_ptr() for x in inputs]
        found: list[Tensor | None] = [empty(*found_in) if s else None for s in searched]
        if search is not None:
            search(*at, *(0 if f is None else f.data_ptr() for f in found), *tail)
        parameters: list[float] = []
        out = []
        for sides, given, amax, seed, is_wanted in zip(bound, stats, found, seeds, values, strict=True):
            made = []
            for side in sides:
                if side is None:
                    parameters.append(0)
                    continue
                known = given[side.stats] or (None,) * (side.stats.stop - side.stats.start)
                made.append(side.make(known, amax if side.amax else None, seed, None))
                parameters += made[-1].parameters
            value = empty(*memory) if is_wanted else None
            parameters.append(0 if value is None else value.data_ptr())
            measured = [s for m in made for s in m.measured]
            rest = iter(made)
            row, col = ((), ()) if not made else (next(rest).buffers if s is not None else () for s in sides)
            out.append(Produced(row, col, measured, value))
        launch(*at, *parameters, *tail)
        return out

    return run


def aligned(x: Tensor) -> Tensor:
    """The same numbers, contiguous from a multiple of ``ALIGNED`` bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()
