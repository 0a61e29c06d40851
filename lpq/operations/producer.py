"""Producers: the operands of matrices that a source computes. What is computed is not written, unless it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lpq.operations.binding import Operand
from lpq.operations.encoder import Known, Wanted, bind_encoder, operands_of
from lpq.operations.source import Source


class Output(NamedTuple):
    """A description of all that is wanted of one output of a source."""

    wanted: Wanted | None
    """How it is encoded; None: it is not."""
    value: bool = False
    """Whether the matrix itself is returned, too, for a consumer in high precision."""


class Produced(NamedTuple):
    """All that was made of one output."""

    row: Sequence[Tensor]
    col: Sequence[Tensor]
    """The buffers of the operands, as ``Encoder.encode`` returns them."""
    stats: Sequence[Tensor]
    value: Tensor | None


class Producer(NamedTuple):
    """Computes and encodes matrices of one shape."""

    operands: tuple[tuple[Operand | None, Operand | None], ...]
    """The row operand and the column operand of each output."""
    produce: Callable[[Sequence[Tensor], Sequence[Known], Sequence[Tensor | None]], list[Produced]]
    """``produce(inputs, known, seeds)``, with the statistics that are known and a seed for each output. The device is
    the current one."""


def bind_producer(source: Source, outputs: Sequence[Output]) -> Producer:
    """Choose and bind the kernel that computes and encodes all outputs; where there is none, the source's definition
    computes them, and an encoder encodes each."""
    if len(outputs) != source.outputs:
        raise ValueError(f"{source.name} has {source.outputs} outputs, and {len(outputs)} are described")
    encoders = [None if output.wanted is None else bind_encoder(output.wanted) for output in outputs]

    def produce(inputs: Sequence[Tensor], known: Sequence[Known], seeds: Sequence[Tensor | None]) -> list[Produced]:
        made = []
        for x, output, encoder, stats, seed in zip(
            source.compute(*inputs), outputs, encoders, known, seeds, strict=True
        ):
            encoded = ((), (), ()) if encoder is None else encoder.encode(x, stats, seed)
            made.append(Produced(*encoded, x if output.value else None))
        return made

    operands = tuple((None, None) if output.wanted is None else operands_of(output.wanted) for output in outputs)
    return Producer(operands, produce)
