"""Programs in Triton that encode, tile by tile, what a source computes: ``produced_tiles`` for any GPU.

They are one kernel, ``lpq.kernels.triton.produce``, compiled for a source and the formats of its outputs. No source and
no format has code for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.operations.binding import Encoding
from lpq.operations.produced_tiles import (
    Produced,
    Run,
    SourceOutput,
    Values,
    aligned,
    n_values_of_halves,
    not_here,
    sizes_of_inputs,
    source_output,
    unfit,
)
from lpq.operations.sides import shared
from lpq.operations.source import Source
from lpq.operations.states import Recall
from lpq.operations.tile_program import TileProgram, tile_program
from lpq.registry import KernelSpec

LEAST = 64
"""The rows and columns of a tile, if no block is larger."""


SPEC = KernelSpec.triton("produce", "lpq.operations.produced_programs:bind")
"""All sources have kernels of this kind, behind the kernels of ``produced_tiles.SPEC``."""


def why_not(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no program computes a source's matrices of this kind; None: one does."""
    if source.program is None:
        return f"{source.name} has no kernel in Triton"
    return not_here(SPEC, source, dtype, device) or ("there are no elements" if 0 in shape else None)


def operands(e: Encoding, recall: Recall | None = None) -> SourceOutput | str:
    """Describe how a program encodes one output, or why it does not."""
    if True in e.exact:
        return "programs in Triton make no exact forms"
    return source_output(e, recall, lambda quantizer, direction: tile_program(quantizer, direction, e.dtype, e.device))


NO_SIDE = (None, None, None, (None,), (None,), (None,))
"""In place of an operand of which nothing is wanted: its functions, their options, and what they are given."""


class _Made(NamedTuple):
    """The tensors that a program is about to write for one operand."""

    arguments: tuple[Any, ...]
    buffers: Sequence[Tensor]
    measured: Sequence[Tensor]


NOTHING = _Made(NO_SIDE, (), ())
Stats = Sequence[Tensor | None]


class _Side(NamedTuple):
    """One operand of matrices of one shape, bound."""

    quantizer: Any
    program: TileProgram
    shape: tuple[int, int]
    options: Any
    """The options of the program, as a constant."""
    stats: slice
    """Its statistics, among the statistics of both operands."""
    before: tuple[bool, ...]
    """For each statistic, whether it is found before."""
    beside: tuple[bool, ...]
    """For each, whether it is measured while the operand is written."""
    returns: bool
    """Whether the statistics are returned."""
    follows: bool
    """Whether the row operand has the same statistics: this operand is its transpose."""

    def memory(self, wanted: Sequence[bool], like: Tensor) -> Stats:
        """Memory for some of the statistics."""
        from lpq.kernels.triton import empty_amaxes

        pairs = zip(self.quantizer.stats, wanted, strict=True)
        return [empty_amaxes(like, *self.shape, stat.block) if is_wanted else None for stat, is_wanted in pairs]

    def measure(self, found: Stats) -> tuple[Any, ...]:
        """The arguments of a run that measures what must be known before."""
        if True not in self.before:
            return NO_SIDE
        return None, self.program.measure, self.options, (None,), (None,), _bits(found)

    def encode(self, given: Stats, found: Stats, like: Tensor) -> _Made:
        """The arguments of the run that encodes, and what it writes."""
        pairs = zip(given[self.stats] or found, found, strict=True)
        known = [one if other is None else other for one, other in pairs]
        if self.follows:
            known = [None if one is None else one.t() for one in known]
        beside = self.memory(self.beside, like)
        buffers = self.quantizer.storage.fresh(self.quantizer, self.shape, like).tensors()
        arguments = (
            self.program.write, self.program.measure if True in self.beside else None, self.options,
            tuple(map(_bytes, buffers)), tuple(None if one is None else aligned(one)[0] for one in known) or (None,),
            _bits(beside),
        )  # fmt: skip
        pairs = zip(beside, found, strict=True)
        measured = [one if other is None else other for one, other in pairs] if self.returns else []
        return _Made(arguments, buffers, [one for one in measured if one is not None])


def _bind_side(e: Encoding, direction: Direction, program: TileProgram | None) -> _Side | None:
    from lpq.kernels.triton.produce import constant

    if program is None:
        return None
    (rows, cols), count = e.shape, len(e.row.stats) if e.row is not None else 0
    quantizer, shape, first = (e.row, (rows, cols), 0) if direction == "row" else (e.col, (cols, rows), count)
    follows = direction == "col" and shared(e.row, e.col)
    first = 0 if follows else first
    stats = slice(first, first + len(quantizer.stats))
    given = e.given[stats] or (False,) * len(quantizer.stats)
    before = [needed and not known for needed, known in zip(program.before, given, strict=True)]
    returns = e.measure and not follows
    beside = [returns and not found for found in before]
    if follows:
        before = [False for _ in before]
    return _Side(
        quantizer, program, shape, constant(program.options), stats, tuple(before), tuple(beside), returns, follows
    )


def _tile(outputs: Sequence[SourceOutput | None]) -> tuple[int, int]:
    """The rows and columns of a tile that has whole blocks of each operand."""
    high = wide = LEAST
    for output in outputs:
        for program, transposed in ((output.row, False), (output.col, True)) if output is not None else ():
            if program is not None:
                down, across = program.block[::-1] if transposed else program.block
                high, wide = max(high, down), max(wide, across)
    return high, wide


def bind(
    source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
    outputs: Sequence[SourceOutput | None], values: Sequence[bool],
) -> Run:  # fmt: skip
    """As ``produced_tiles.bind``."""
    from lpq.kernels.triton.produce import SourceInputs, produce

    assert source.program is not None
    program, sizes = source.program, sizes_of_inputs(source, shape, dtype)
    matrices = source.inputs.count("matrix")
    columns = matrices + source.inputs.count("row")
    sides = [
        (None, None) if o is None else (_bind_side(o.e, "row", o.row), _bind_side(o.e, "col", o.col)) for o in outputs
    ]
    tile = _tile(outputs)
    searches = any(side is not None and True in side.before for both in sides for side in both)

    def find(inputs: SourceInputs) -> list[tuple[Stats, Stats]]:
        """The statistics that must be known before, by a run of the source that encodes nothing."""
        like, found, arguments = inputs.matrices[0], list[tuple[Stats, Stats]](), list[tuple[Any, ...]]()
        for row, col in sides:
            of_row, of_col = (() if side is None else side.memory(side.before, like) for side in (row, col))
            found.append((of_row, of_row if col is not None and col.follows else of_col))
            measured = NO_SIDE if row is None else row.measure(of_row), NO_SIDE if col is None else col.measure(of_col)
            arguments.append((None, *measured, None, 0))
        if searches:
            produce(program, inputs, arguments, tile)
        return found

    def run(tensors: Sequence[Tensor], known: Sequence[Any], seeds: Sequence[Tensor | None]) -> list[Produced]:
        for i, (x, (count, x_dtype)) in enumerate(zip(tensors, sizes, strict=True)):
            if x.numel() != count or x.dtype is not x_dtype:
                raise unfit(source, i, x, count, x_dtype)
        tensors = aligned(*tensors)
        inputs = SourceInputs([x.view(shape) for x in tensors[:matrices]], tensors[matrices:columns], tensors[columns:])
        out, arguments = list[Produced](), list[tuple[Any, ...]]()
        for (row, col), output, (of_row, of_col), is_wanted, stats, seed in zip(
            sides, outputs, find(inputs), values, known, seeds, strict=True
        ):
            recall = None if output is None else output.recall
            given = (stats if recall is None else recall(None, stats, None)) or ()
            first = NOTHING if row is None else row.encode(given, of_row, tensors[0])
            second = NOTHING if col is None else col.encode(given, of_col, tensors[0])
            value = torch.empty_like(inputs.matrices[0]) if is_wanted else None
            offset = 0 if output is None else output.e.offset
            arguments.append((value, first.arguments, second.arguments, seed, offset))
            out.append(Produced(first.buffers, second.buffers, (*first.measured, *second.measured), value))
        produce(program, inputs, arguments, tile)
        return out

    return run


def bind_halves(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Values:
    """As ``producer.bind_halves``, where programs in Triton compute the source."""
    from lpq.kernels.triton.produce import SourceInputs, produce

    assert source.program is not None
    program, (rows, cols), n_values = source.program, shape, n_values_of_halves(source)
    unwanted = [None] * (source.outputs - n_values)

    def run(halves: Tensor, *others: Tensor) -> Tensor:
        y = halves.new_empty((rows, n_values * cols))
        outputs = [(value, NO_SIDE, NO_SIDE, None, 0) for value in (*y.chunk(n_values, dim=1), *unwanted)]
        matrices = [*halves.contiguous().chunk(2, dim=1), *(x.contiguous() for x in others)]
        produce(program, SourceInputs(matrices, (), ()), outputs, (LEAST, LEAST), halves=True)
        return y

    return run


def _bytes(buffer: Tensor) -> Tensor:
    """A buffer as a program takes it: 8-bit floats as bytes."""
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def _bits(stats: Stats) -> tuple[Tensor | None, ...]:
    """Statistics as a program writes them: fp32 as integers, which order as the magnitudes do."""
    return tuple(t.view(torch.int32) if t is not None and t.dtype is torch.float32 else t for t in stats) or (None,)
