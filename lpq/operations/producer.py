"""Producers: the operands of matrices that a source computes. The matrices are not written, unless they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lpq.operations import produced_tiles
from lpq.operations.binding import Operand
from lpq.operations.encoder import (
    Encoder,
    Known,
    Wanted,
    bind_encoder,
    bind_stats,
    encoding_of,
    is_made_of_row,
    sides_of,
)
from lpq.operations.inputs import as_matrix
from lpq.operations.produced_tiles import Produced, TiledOutput
from lpq.operations.sides import shared
from lpq.operations.source import Source


class Output(NamedTuple):
    """A description of all that is wanted of one output of a source."""

    wanted: Wanted | None
    """How it is encoded; None: it is not."""
    value: bool = False
    """Whether the matrix itself is returned, too, for a consumer in high precision."""


class Producer(NamedTuple):
    """Computes and encodes matrices of one shape."""

    operands: tuple[tuple[Operand | None, Operand | None], ...]
    """The row operand and the column operand of each output."""
    produce: Callable[[Sequence[Tensor], Sequence[Known], Sequence[Tensor | None]], list[Produced]]
    """``produce(inputs, known, seeds)``, with the statistics that are known and a seed for each output: the buffers of
    the operands and the statistics, as ``Encoder.encode`` returns them, and the matrix, if it is wanted. The device is
    the current one."""
    why_not: tuple[str | None, ...]
    """For each output why it is written and encoded in another run; None: one run computes and encodes it."""


def bind_producer(source: Source, outputs: Sequence[Output]) -> Producer:
    """Choose and bind the kernel that computes all outputs, and encodes those whose formats have sides for it. An
    encoder encodes the others. Where no kernel computes them, the source's definition does."""
    if len(outputs) != source.outputs:
        raise ValueError(f"{source.name} has {source.outputs} outputs, and {len(outputs)} are described")
    encoders = [None if output.wanted is None else bind_encoder(output.wanted) for output in outputs]
    operands = tuple((None, None) if encoder is None else (encoder.row, encoder.col) for encoder in encoders)
    first = next((output.wanted for output in outputs if output.wanted is not None), None)
    if first is None:
        return _composed(source, outputs, encoders, operands, "nothing is encoded")
    shape, dtype, device = first.shape, first.dtype, first.device
    why = produced_tiles.why_not(source, shape, dtype, device)
    if why is not None:
        return _composed(source, outputs, encoders, operands, why)
    tiles = [None if output.wanted is None else _tiles(output.wanted) for output in outputs]
    described = [tile if isinstance(tile, TiledOutput) else None for tile in tiles]
    reasons = tuple(tile if isinstance(tile, str) else None for tile in tiles)
    values = [output.value or reason is not None for output, reason in zip(outputs, reasons, strict=True)]
    run = produced_tiles.bind(source, shape, dtype, device, described, values)
    others = [
        (i, encoder)
        for i, (encoder, why) in enumerate(zip(encoders, reasons, strict=True))
        if why is not None and encoder is not None
    ]
    if not others:
        return Producer(operands, run, reasons)

    def produce(inputs: Sequence[Tensor], known: Sequence[Known], seeds: Sequence[Tensor | None]) -> list[Produced]:
        made = run(inputs, [None if why is not None else k for k, why in zip(known, reasons, strict=True)], seeds)
        for i, encoder in others:
            value = made[i].value
            assert value is not None
            made[i] = Produced(*encoder.encode(value, known[i], seeds[i]), value if outputs[i].value else None)
        return made

    return Producer(operands, produce, reasons)


def _composed(
    source: Source,
    outputs: Sequence[Output],
    encoders: Sequence[Encoder | None],
    operands: tuple[tuple[Operand | None, Operand | None], ...],
    why: str,
) -> Producer:
    """Compute by the definition, and encode each output by itself."""

    def produce(inputs: Sequence[Tensor], known: Sequence[Known], seeds: Sequence[Tensor | None]) -> list[Produced]:
        made = []
        matrices = (as_matrix(x) if kind == "matrix" else x for x, kind in zip(inputs, source.inputs, strict=True))
        for x, output, encoder, stats, seed in zip(
            source.compute(*matrices), outputs, encoders, known, seeds, strict=True
        ):
            encoded = ((), (), ()) if encoder is None else encoder.encode(x, stats, seed)
            made.append(Produced(*encoded, x if output.value else None))
        return made

    return Producer(operands, produce, (why,) * len(outputs))


def _tiles(wanted: Wanted) -> TiledOutput | str:
    """Describe how a kernel encodes an output, or why it does not."""
    row, col = sides_of(wanted)
    if is_made_of_row(wanted):
        return "the column operand is made of the row operand"
    if wanted.sections is not None:
        return "its rows are encoded in sections"
    if wanted.across and any(side is not None and side.stochastic for side in (row, col)):
        return "kernels draw random bits from the first column on"
    if shared(row, col) and row is not None and row.stochastic:
        return "both operands have the same random bits"
    return produced_tiles.operands(encoding_of(wanted), bind_stats(wanted))
