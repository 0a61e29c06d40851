"""NVFP4's CUDA kernels: one read for the amaxes of the operands, one more for both operands.

Where each row has an amax, the row operand alone takes one read in all, if a block of threads can hold a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh, fresh_by_columns
from lpq.kernels.tiles import (
    BROAD,
    FINISH,
    LARGE_TILE,
    LOW,
    SQUARE,
    Shape,
    amax_finish,
    at_once,
    bind_amax_parts,
    broadened,
    covering,
    divides,
    is_whole,
    pointer,
    reading,
    tile_kernels,
    tiles,
)
from lpq.operations.binding import Encode, Encoded, Encoding, cached_by_shape
from lpq.operations.fused_pair import Job, Look, Made, Make
from lpq.operations.line_amaxes import bind_amaxes_of_lines, measure_lines
from lpq.operations.measuring import measure_reference
from lpq.operations.sides import shared
from lpq_nvfp4 import eden, search
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP

QUANTIZE = tile_kernels("nvfp4/quantize.cu", "quantize", "PPPPPPPPIPPPIPPPqI")
AMAXES = tile_kernels("nvfp4/amaxes.cu", "amaxes", "PPPPPI")[SQUARE]
WARPS, LINES = 8, 8
"""Warps of a block of threads that holds whole rows, and rows of a warp, which takes ``BROAD`` columns at once."""
HOLDING = Shape(WARPS * LINES, BROAD)
WHOLE_ROWS = {
    shared: CudaKernel(
        "nvfp4/rows.cu", "quantize_rows", "PP(PPPPIPPPq)Iqq", threads=32 * WARPS, shared=shared, waits=True
    )
    for shared in (0, LARGE_TILE)
}
"""By the dynamic shared memory of a block: what it holds may be more than the ``FIXED`` bytes that it has without."""
FIXED = 48 << 10
AT_ONCE = 4
"""How many blocks of threads a multiprocessor runs, which take several tiles in turn where there are more."""
UNKNOWN = (None,) * 4
BY_ROWS = 7
ROUNDINGS = {False: 0, True: 1, "unbiased": 2}
SEARCHES = {("mse", 448): 3, ("mae", 448): 4, ("mse", 256): 5, ("mae", 256): 6}
"""The kernels' numbers for the values of ``stochastic``, and of ``error`` and ``norm``. ``BY_ROWS`` more if each row
has an amax (``csrc/nvfp4/ways.cuh``)."""
NOTHING = Made((), (), (0,) * 9)
"""In place of an operand that is not wanted."""


def why_not(first: NVFP4Quantizer, second: NVFP4Quantizer | None = None) -> str | None:
    """Both operands come from one kernel if their blocks have one shape, and what has an amax."""
    if (reason := eden.why_not(first, second)) is not None:
        return reason
    if second is not None and first.scaling != second.scaling:
        return "serves both operands at once only if an amax is of the same for both, else one at a time"
    if second is not None and first.block != second.block:
        return "serves both operands at once only if their blocks have one shape, else one at a time"
    if second is not None and first.rht:
        return "the row operand of a pair is not rotated"
    return None


def quantize_why_not(first: NVFP4Quantizer, second: NVFP4Quantizer | None = None) -> str | None:
    """As ``why_not``, and kernels must choose scales as the operands' do."""
    return search.why_not(*(side for side in (first, second) if side is not None)) or why_not(first, second)


def measure(
    x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The amaxes of the wanted operands and of their blocks. Only the row's are measured where a pair shares them."""
    dtype = dtype or x.dtype
    if x.numel() == 0 or (row is not None and row.rht):
        return measure_reference(x.to(dtype), row, col)
    if shared(row, col):
        col = None
    x = x.contiguous()
    rows, cols = x.shape
    of_rows = x.new_empty(_blocks(row, rows, cols), dtype=torch.float32) if row is not None else None
    of_cols = x.new_empty(_blocks(col, cols, rows), dtype=torch.float32) if col is not None else None
    side = row or col
    assert side is not None
    rotated = col is not None and col.rht
    count, index = tiles(rows, cols, SQUARE), x.get_device()
    blocks = at_once(count, AT_ONCE, index)
    by_rows = side.scaling == "row"
    wanted = not (side.rht or by_rows), rotated
    parts = [x.new_empty((blocks,), dtype=torch.float32) if found else None for found in wanted]
    macros = covering(SQUARE, is_whole(x, rows, cols, SQUARE)) + _switches(rotated, side.block == "16x16", True)
    AMAXES.launch(
        index, reading(x.dtype, dtype) + macros, blocks,
        x.data_ptr(), *map(pointer, (*parts, of_rows, of_cols)), count, rows, cols,
    )  # fmt: skip
    if by_rows:
        lines = measure_lines(x, row, col, dtype)
        amaxes_of_blocks = [amaxes for amaxes in (of_rows, of_cols) if amaxes is not None]
        return [one for both in zip(lines, amaxes_of_blocks, strict=True) for one in both]
    found: list[Tensor] = []
    for of_operand, of_blocks in zip((parts[0], parts[rotated]), (of_rows, of_cols), strict=True):
        if of_operand is not None and of_blocks is not None:
            found += (amax_finish(of_operand), of_blocks)
    return found


def bind(e: Encoding) -> Encode | None:
    """Bind an encoding of matrices of one shape. It is left to the reference where the first row of a shard cuts a
    group of 16 rows that share random bits of the column operand, which happens in no layer; and where the row operand
    is rotated, which no quantizer does."""
    (rows, cols), row, col, index = e.shape, e.row, e.col, e.device.index or 0
    if (col is not None and col.stochastic and e.offset % GROUP) or (row is not None and row.rht):
        return None
    if col is None and row.scaling == "row" and not (e.given and e.given[0]) and (held := rows_held(e)) is not None:
        return _bind_whole_rows(e, *held)
    derived = shared(row, col)
    given = e.given or (False,) * 4
    of_col = 0 if row is None or col is None or derived else 2  # where its statistics begin
    sides = [(row, given[0]), (None if derived else col, given[of_col])]
    unknown = [side for side, amax_given in sides if side is not None and (e.measure or not amax_given)]
    find = _bind_find(e, unknown) if unknown else None
    job = Job((rows, cols), e.held, e.device, e.offset, e.measure, e.dispatched)
    make_row = bind_operand(row, job) if row is not None else None
    beside = job._replace(shape=(cols, rows), measure=e.measure and not derived)
    make_col = bind_operand(col, beside) if col is not None else None
    apart = col is not None and (col.rht or col.scaling == "row")
    by_block = e.measure or given[1] or given[of_col + 1]
    macros, shape = _macros(row, col, derived, by_block)
    if col is None and row.block == "1x16" and e.aligned and e.held is e.dtype:
        shape = broadened(rows, cols, e.held, shape)
    count = tiles(rows, cols, shape)
    together = 128  # rows of tiles that a block of threads takes in turn
    if row is not None and col is not None:
        together = 512 if col.rht else 256
    launch = QUANTIZE[shape].bind(
        index, reading(e.held, e.dtype) + macros + covering(shape, e.aligned and divides(rows, cols, shape)),
        max(-(-count * shape.tall // together), at_once(count, AT_ONCE, index)),
    )  # fmt: skip
    offset = e.offset

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        stats = stats or UNKNOWN
        rotated, plain = find(at) if find is not None else (None, None)
        first = make_row(stats[:2], plain, seed, None) if make_row is not None else NOTHING
        second = NOTHING
        if make_col is not None:
            second = make_col(stats[of_col : of_col + 2], rotated if apart else plain, seed, None)
        one, other = first.parameters, second.parameters
        launch(
            at, *one[:3], *other[:3], *one[3:7], *other[3:7], 0 if seed is None else seed.data_ptr(), offset, count,
            rows, cols,
        )  # fmt: skip
        return first.buffers, second.buffers, (*first.measured, *second.measured)

    return encode


def rows_held(e: Encoding) -> tuple[int, int] | None:
    """How many warps hold a row, and how many of its tiles each warp has in shared memory beside the one in registers;
    None for rows that a block of threads cannot hold."""
    across = -(-e.shape[1] // BROAD)
    abreast = next((count for count in (1, 2, 4) if across <= count), WARPS)
    kept = -(-across // abreast) - 1
    return (abreast, kept) if 0 <= kept <= LARGE_TILE // _tile_bytes(e) else None


def _tile_bytes(e: Encoding) -> int:
    """The bytes of a tile of each warp of a block."""
    return HOLDING.tall * HOLDING.wide * e.dtype.itemsize


def _bind_whole_rows(e: Encoding, abreast: int, kept: int) -> Encode:
    """Bind an encoding of the row operand, each row with its own amax, that reads a matrix once."""
    (rows, cols), row, given = e.shape, e.row, e.given or (False, False)
    make = bind_operand(row, Job((rows, cols), e.held, e.device, e.offset, e.measure, e.dispatched))
    empty, amaxes = allocator(e.device, dispatched=e.dispatched), fresh((rows, 1), torch.float32)
    high = HOLDING.tall // abreast
    whole = e.aligned and divides(rows, cols, Shape(high, BROAD))
    macros, _ = _macros(row, None, False, e.measure or given[1])
    launch = WHOLE_ROWS[LARGE_TILE if kept * _tile_bytes(e) > FIXED else 0].bind(
        e.device.index or 0,
        reading(e.held, e.dtype) + macros + covering(HOLDING, whole) + (f"LPQ_HELD={kept}",), -(-rows // high),
    )  # fmt: skip

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        found = empty(*amaxes)
        made = make(stats or UNKNOWN[:2], found, seed, None)
        launch(at, found.data_ptr(), *made.parameters, abreast, rows, cols)
        return made.buffers, (), made.measured

    return encode


quantize = cached_by_shape(bind)
Find = Callable[[int], tuple[Tensor | None, Tensor | None]]


def _bind_find(e: Encoding, unknown: Sequence[NVFP4Quantizer]) -> Find:
    """Bind a function that finds what the amaxes of operands follow from: of columns and of rows; else of the rotated
    columns of the matrix, and of the matrix."""
    if unknown[0].scaling == "tensor" and any(side.rht for side in unknown):
        return bind_rotated_parts(e, any(not side.rht for side in unknown))
    if unknown[0].scaling == "tensor":
        empty = allocator(e.device, dispatched=e.dispatched)
        memory, measure_amax = bind_amax_parts(e.held, e.dtype, e.shape[0] * e.shape[1], e.device)

        def find_parts(at: int) -> tuple[Tensor | None, Tensor | None]:
            found = empty(*memory)
            measure_amax(at, found.data_ptr())
            return None, found

        return find_parts
    amaxes, has_row = bind_amaxes_of_lines(e), e.row is not None

    def find(at: int) -> tuple[Tensor | None, Tensor | None]:
        found = amaxes(at)
        return found[-1], (found[0] if has_row else None)

    return find


def way(side: NVFP4Quantizer) -> int:
    """The kernels' number for how an operand is rounded and how its scales are chosen."""
    kind = SEARCHES[side.error, side.norm] if side.searches else ROUNDINGS[side.stochastic]
    return kind + BY_ROWS * (side.scaling == "row")


def bind_operand(side: NVFP4Quantizer, job: Job) -> Make:
    """Decide how one operand is allocated. Its ``found`` is what ``_bind_find`` finds."""
    high, wide = job.shape
    lines, blocks = _blocks(side, high, wide)
    empty, offset = job.empty, job.offset
    by_rows = side.scaling == "row"
    amaxes, value = fresh((lines, blocks), torch.float32), fresh((high, 1) if by_rows else (), torch.float32)
    data = fresh((high, blocks * (GROUP // 2)), torch.uint8)
    scale = fresh((lines, blocks), E4M3) if side.block == "16x16" else fresh_by_columns(lines, blocks, E4M3)
    finish = FINISH.bind(job.device.index or 0, (), 1) if job.measure and not by_rows else None
    measures = job.measure

    def make(
        stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
    ) -> Made:
        drawn = 0 if seed is None else seed.data_ptr()
        if into is not None:
            assert found is not None
            at = (*map(Tensor.data_ptr, into), 0, 0)[:3]  # decoded values have no scales
            return Made(into, (), (*at, found.data_ptr(), 1, 0, 0, drawn, 0))
        amax, given = stats
        buffers = empty(*data), empty(*scale), empty(*value)
        measured: tuple[Tensor, ...] = ()
        if measures:
            assert found is not None
            measured = found if by_rows else empty(*value), empty(*amaxes)
        if finish is not None:
            assert found is not None
            finish(found.data_ptr(), found.numel(), measured[0].data_ptr())
        known = amax if amax is not None else found
        assert known is not None
        parameters = (
            buffers[0].data_ptr(), buffers[1].data_ptr(), buffers[2].data_ptr(), known.data_ptr(), known.numel(),
            0 if given is None else given.data_ptr(), measured[1].data_ptr() if measured else 0, drawn, offset,
        )  # fmt: skip
        return Made(buffers, measured, parameters)

    return make


def _blocks(side: NVFP4Quantizer, high: int, wide: int) -> tuple[int, int]:
    return high if side.block == "1x16" else -(-high // GROUP), -(-wide // GROUP)


def bind_rotated_parts(e: Encoding, plain: bool) -> Look:
    """Bind a function that finds partial amaxes of the rotated columns of the matrix at an address, and of the matrix
    itself if ``plain``; the amax is the largest of them."""
    (rows, cols), index, empty = e.shape, e.device.index or 0, allocator(e.device, dispatched=e.dispatched)
    count = tiles(rows, cols, SQUARE)
    parts = at_once(count, AT_ONCE, index)
    memory = fresh((parts,), torch.float32)
    macros = covering(SQUARE, e.aligned and divides(rows, cols, SQUARE)) + _switches(True, False, False)
    launch = AMAXES.bind(index, reading(e.held, e.dtype) + macros, parts)

    def find_rotated(at: int) -> tuple[Tensor, Tensor | None]:
        found = empty(*memory)
        beside = empty(*memory) if plain else None
        launch(at, 0 if beside is None else beside.data_ptr(), found.data_ptr(), 0, 0, count, rows, cols)
        return found, beside

    return find_rotated


@cache
def _switches(rotated: bool, square: bool, stats: bool) -> tuple[str, ...]:
    switches = {"LPQ_SQUARE": square, "LPQ_ROTATED": rotated, "LPQ_STATS": stats}
    return tuple(name for name, on in switches.items() if on)


@cache
def _macros(
    row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, derived: bool, stats: bool
) -> tuple[tuple[str, ...], Shape]:
    """The macros that the source is compiled with, and the shape of its tiles."""
    side = row or col
    assert side is not None
    sides = (("LPQ_ROW", row), ("LPQ_COL", col))
    wanted = [f"{name}={1 + way(side)}" for name, side in sides if side is not None]
    switches = _switches(col is not None and col.rht, side.block == "16x16", stats)
    return (*wanted, *(["LPQ_SHARED"] if derived else []), *switches), LOW if col is None else SQUARE
