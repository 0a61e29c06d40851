"""Encoding in sections, by kernels: groups of rows, or the matrices of a stack, each by itself and all in one launch.

The kernel is the one that writes operands of any two formats from one read (``fused_pair``), compiled for sections. In
place of codes the kernel may also write decoded values in bf16, in the basis in which the operand is stored, to be
multiplied. Other operands are encoded elsewhere, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.formats.sections import capacity, grid, unit
from lpq.kernels.fresh import Fresh, allocator, fresh, fresh_by_columns
from lpq.kernels.sections import SECTIONS, Find, SectionedMatrix, bind_amaxes
from lpq.kernels.table import bound_once
from lpq.kernels.tiles import BROAD, SQUARE, Shape, tile_kernels
from lpq.operations.binding import ALIGNED as ALIGNED_BYTES
from lpq.operations.binding import Encoded, Encoding
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import ALIGNED, NOTHING, Job, Struct, TileSide, pair_macros, side_of
from lpq.operations.states import State, recall, recalls

LARGEST = Shape(256, BROAD)
Amaxes = tuple[Tensor | None, Tensor | None]
"""The amaxes of sections for the row operand and for the column operand, where they are known."""
SectionedOperands = tuple[list[Tensor], list[Tensor], Amaxes]
"""The buffers of the row operand and of the column operand, and the amaxes by which they were encoded."""
Encode = Callable[..., SectionedOperands]
"""``encode(x, offs, seeds, given)``."""
Run = Callable[..., Encoded]
"""``run(x, known, seeds, *offs)`` for any tensor; ``known`` is a state, or amaxes of sections."""
DECODED = Form()
"""The form of an operand that exists decoded only."""


def bind_any(quantizer: Quantizer, e: Encoding, state: bool) -> tuple[Run, tuple[bool, bool]] | None:
    """Bind kernels that make the operands of ``e``, and tell which operands are made decoded: those that ``e`` wants
    so, or none. Return None where no kernel makes them. ``state``: whether ``known`` is a state."""
    (rows, cols), sections = e.shape, e.sections
    assert sections is not None
    if not sections.at_once or (e.row is None and e.col is None):
        return None
    if 0 in (sections.number, cols) or (sections.stack and not rows):
        return None
    if e.measure and not (e.row is not None and same_amaxes(quantizer.side("row"), quantizer.side("col"))):
        return None
    e = e._replace(exact=(e.exact[0] and e.row is not None, e.exact[1] and e.col is not None))
    if state:
        row = e.row is not None and True in recalls(quantizer, e.row, None)
        e = e._replace(given=(row, e.col is not None and True in recalls(quantizer, None, e.col)))
    encode = bind(e)
    if encode is None:
        return bind_any(quantizer, e._replace(exact=(False, False)), state) if True in e.exact else None
    is_given = True in e.given

    @cache
    def misaligned() -> Encode:
        encode_anywhere = bind(e._replace(aligned=False))
        assert encode_anywhere is not None
        return encode_anywhere

    def run(x: Tensor, known: Any, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        x = x if x.is_contiguous() else x.contiguous()
        how = misaligned() if x.data_ptr() % ALIGNED_BYTES else encode
        amaxes: Amaxes = (None, None)
        if is_given:
            amaxes = given_of(quantizer, e.row, e.col, known) if state else (known[0], known[0])
        of_row, of_col, (measured, _) = how(x, offs[0] if offs else None, seeds, amaxes)
        if e.row is not None:
            of_row += offs
        if e.col is not None:
            of_col += offs
        return of_row, of_col, (measured,) if e.measure and measured is not None else ()

    return run, e.exact


def given_of(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None, state: State | None) -> Amaxes:
    """The static amaxes of sections for each operand; None for an operand without."""
    amaxes: list[Tensor | None] = []
    for first, second in ((row, None), (None, col)):
        has_operand = first is not None or second is not None
        stats = recall(quantizer, first, second, state) if has_operand and state else []
        amax = next((k for k in stats if k is not None), None)
        amaxes.append(None if amax is None else amax.contiguous())
    return amaxes[0], amaxes[1]


def same_amaxes(row: Quantizer, col: Quantizer) -> bool:
    """Whether the row operand and the column operand have the same amaxes of sections."""
    return row == col and _of_all(row) == 1


def _of_all(quantizer: Quantizer) -> int:
    """How many statistics are one value of a whole section."""
    return sum(stat.of_all for stat in quantizer.stats)


def bind(e: Encoding) -> Encode | None:
    """Bind the kernel for matrices of one shape; None where there is none."""
    if why_not(e) is not None:
        return None
    sides: list[TileSide | None] = []
    for quantizer, direction in ((e.row, "row"), (e.col, "col")):
        side = None if quantizer is None else side_of(quantizer, cast("Direction", direction), e.device)
        if isinstance(side, str):
            return None
        sides.append(side)
    return bind_sides(e, sides[0], sides[1])


def why_not(e: Encoding) -> str | None:
    """Why no kernel makes such operands, whatever the formats' sides are; None if one may."""
    tall, has_amaxes = _tall(e), e.given or (False, False)
    for quantizer, dim in ((e.row, 0), (e.col, 1)):
        if quantizer is None:
            continue
        if quantizer.plain:
            return "an ordinary matrix is not encoded"
        if _has_tall_blocks(quantizer) and tall is None:
            return f"{quantizer} has blocks of several rows: kernels cut them from a stack's matrices, not from groups"
        if has_amaxes[dim] and _of_all(quantizer) != 1:
            return f"{quantizer} has several statistics of the whole"
        if e.exact[dim] and (e.shape[1] % ALIGNED or (tall is not None and tall % ALIGNED)):
            return f"what operands decode to is made for sizes in multiples of {ALIGNED}"
        contraction = e.shape[1] if dim == 0 else tall
        if e.exact[dim] and contraction is not None and not quantizer.whole(contraction):
            return f"what operands decode to is made for whole groups of columns that {quantizer} rotates together"
    return None


def _tall(e: Encoding) -> int | None:
    """The rows of each matrix of a stack; None for groups."""
    assert e.sections is not None
    return e.shape[0] // e.sections.number if e.sections.stack else None


@bound_once
def decodable(text: str, direction: Direction, device: torch.device, stack: bool) -> bool:
    """Whether kernels make decoded values of an operand of rows in groups, or of a stack."""
    quantizer: Quantizer = registry.quantizer(text)
    side = side_of(quantizer, direction, device)
    return not isinstance(side, str) and side.decoded is not None and (stack or not _has_tall_blocks(quantizer))


def _has_tall_blocks(quantizer: Quantizer) -> bool:
    """Whether blocks have several rows."""
    return any(buffer.block[0] not in (1, None) for buffer in quantizer.layout)


def bind_sides(e: Encoding, row: TileSide | None, col: TileSide | None) -> Encode | None:
    """Bind these sides, None for an operand that is not wanted."""
    assert e.sections is not None
    (rows, cols), tall, number = e.shape, _tall(e), e.sections.number
    step = 1 if tall is not None or e.col is None else unit(e.col, 1)
    line = tall if tall is not None else capacity(rows, number, step)
    sections = SectionedMatrix(rows, cols, number, tall, step, line, e.dtype, e.device, e.aligned)
    empty = allocator(e.device, dispatched=e.dispatched)
    both = row, col
    hows = [_how(side, decoded) for side, decoded in zip(both, e.exact, strict=True)]
    if None in hows:
        return None
    structs, shapes = zip(*cast("list[tuple[Struct, Shape]]", hows), strict=True)
    memories = [_memory(e, quantizer, dim, sections) for dim, quantizer in enumerate((e.row, e.col))]
    job = Job((0, 0), e.dtype, e.device, dispatched=e.dispatched)
    makes = [None if side is None else side.bind(job) for side in both]
    not_given = [(None,) * len(quantizer.stats) if quantizer else () for quantizer in (e.row, e.col)]
    shape = min(*shapes, LARGEST if tall is not None else SQUARE)
    arguments = f"P({structs[0].parameters})({structs[1].parameters}){SECTIONS}I"
    kernel = tile_kernels("common/pair.cu", "pair", arguments)[shape]
    count = sections.tiles(shape)
    launch = kernel.bind(e.device.index or 0, (*sections.macros(shape), *pair_macros(*structs)), count)
    given_for = e.given or (False, False)
    find = _bind_finding(sections, *(None if flag else side for side, flag in zip(both, given_for, strict=True)))
    tail = *sections.arguments(0)[1:], count, rows, cols

    def encode(
        x: Tensor, offs: Tensor | None, seeds: Tensor | None, amaxes: Amaxes = (None, None)
    ) -> SectionedOperands:
        at, ends = x.data_ptr(), 0 if offs is None else offs.data_ptr()
        first, second = (None, None) if find is None else find(at, ends)
        all_amaxes = first if amaxes[0] is None else amaxes[0], second if amaxes[1] is None else amaxes[1]
        seeds = None if seeds is None else seeds.contiguous()
        parameters: list[float] = []
        out: list[list[Tensor]] = []
        for make, memory, stats, stat in zip(makes, memories, not_given, all_amaxes, strict=True):
            buffers = [empty(*m) for m in memory]
            out.append(buffers)
            if make is None:
                parameters.append(0)
            else:
                parameters += make(stats, stat, seeds, buffers).parameters
        launch(at, *parameters, ends, *tail)
        return out[0], out[1], all_amaxes

    return encode


def _how(side: TileSide | None, decoded: bool) -> tuple[Struct, Shape] | None:
    """The struct that makes an operand, and the shape of its tiles; None if there is none."""
    if side is None:
        return NOTHING, LARGEST
    if not decoded:
        return side.compiled, side.shape
    return None if side.decoded is None else (side.compiled._replace(name=side.decoded[0]), side.decoded[1])


def _memory(e: Encoding, quantizer: Quantizer | None, dim: int, sections: SectionedMatrix) -> list[Fresh]:
    """The places of an operand's buffers. A stack lies in memory as one matrix with all lines below each other; values
    of the lines of a column operand lie group by group."""
    if quantizer is None:
        return []
    (rows, cols), tall, line, number = e.shape, sections.tall, sections.line, sections.number
    if e.exact[dim]:
        shape: tuple[int, ...] = (rows, cols) if dim == 0 else (cols, line)
        if tall is not None:
            shape = (number, tall, cols) if dim == 0 else (number, cols, tall)
        return [fresh(shape, torch.bfloat16)]
    out = []
    for buffer in quantizer.layout:
        dtype = buffer.dtype or e.dtype
        if tall is not None:
            size = buffer.grid(*((tall, cols) if dim == 0 else (cols, tall)))
            strides = (size[0], 1, number * size[0]) if buffer.column_major else None
            out.append(fresh((number, *size), dtype) if strides is None else ((number, *size), strides, dtype))
            continue
        size = grid(
            buffer, *((rows, cols) if dim == 0 else (cols, rows)), number, dim, 1 if dim == 0 else sections.unit
        )
        by_columns = buffer.column_major or (dim == 1 and buffer.block == (1, None))
        out.append(fresh_by_columns(size[0], size[1], dtype) if by_columns else fresh(size, dtype))
    return out


def _bind_finding(
    sections: SectionedMatrix, row: TileSide | None, col: TileSide | None
) -> Callable[[int, int], tuple[Tensor | None, Tensor | None]] | None:
    """A function that finds the amaxes of both operands before the first element is encoded, in few reads; None where
    it has none to find."""
    finds: list[Find | None] = [None, None]
    shared: int | None = None  # the operand whose find serves both
    both = row, col
    order = (1, 0) if col is not None and col.finder is not None else (0, 1)
    for i in order:
        side, other = both[i], both[1 - i]
        if side is None or shared is not None:
            continue
        if side.finder is not None:
            same = other is not None and other.finder is side.finder
            direction: Direction = "row" if i == 0 else "col"
            finds[i], serves = side.finder(sections, direction, other is not None and other.amax, same)
            shared = i if serves else None
        elif side.amax:
            finds[i] = bind_amaxes(sections)
            shared = i if other is not None and other.amax else None

    if finds == [None, None]:
        return None

    def find(at: int, ends: int) -> tuple[Tensor | None, Tensor | None]:
        amaxes: list[Tensor | None] = [None, None]
        for i, run in enumerate(finds):
            if run is not None:
                amaxes[i], beside = run(at, ends)
                if shared == i:
                    amaxes[1 - i] = beside if beside is not None else amaxes[i]
        return amaxes[0], amaxes[1]

    return find
