"""Producers: the operands of matrices that a source computes. The matrices are not written, unless they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lpq.operations import produced_programs, produced_tiles
from lpq.operations.binding import Encoded, Encoding, Operand
from lpq.operations.cut import Cut
from lpq.operations.encoder import (
    BindEncoder,
    Encoder,
    EncoderSpec,
    KnownStats,
    Stats,
    bind_encoder,
    bind_stats,
    encoding_of,
    is_made_of_row,
    sides_of,
)
from lpq.operations.inputs import as_matrix
from lpq.operations.part_encoders import bind_exchange, bind_part, part_spec, placed
from lpq.operations.produced_tiles import Produced, Run, Values, n_values_of_halves
from lpq.operations.sides import draws, shared
from lpq.operations.source import Source
from lpq.operations.states import Recall

MADE_OF_ROW = "the column operand is made of the row operand"


class Kernels(Protocol):
    """The kernels of sources in one language."""

    def why_not(
        self, source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> str | None: ...
    def operands(self, e: Encoding, recall: Recall | None = None) -> Any: ...
    def bind(
        self, source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
        outputs: Sequence[Any], values: Sequence[bool],
    ) -> Run: ...  # fmt: skip
    def bind_halves(
        self, source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Values: ...


KERNELS: tuple[Kernels, ...] = (produced_tiles, produced_programs)
"""The preferred ones first."""


def kernels_of(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Kernels | str:
    """Return the kernels that compute a source's matrices of this kind, or why none do."""
    reasons = []
    for kernels in KERNELS:
        why = kernels.why_not(source, shape, dtype, device)
        if why is None:
            return kernels
        reasons.append(why)
    return "; ".join(reasons)


class Output(NamedTuple):
    """A description of all that is wanted of one output of a source."""

    spec: EncoderSpec | None
    """How it is encoded; None: it is not."""
    value: bool = False
    """Whether the matrix itself is returned, too, for a consumer in high precision, as the source makes it."""
    cut: Cut | None = None
    """How ranks divide the whole matrix, of which this output is one part; None: it is the whole."""


def why_apart(source: Source, output: Output) -> str | None:
    """Why the one output of a source is written and encoded in another run; None: one run computes and encodes it."""
    assert output.spec is not None
    kernels = kernels_of(source, output.spec.shape, output.spec.dtype, output.spec.device)
    tiles = kernels if isinstance(kernels, str) else _described(output, kernels)
    return tiles if isinstance(tiles, str) else None


class Producer(NamedTuple):
    """Computes and encodes matrices of one shape."""

    operands: tuple[tuple[Operand | None, Operand | None], ...]
    """The row operand and the column operand of each output."""
    produce: Callable[[Sequence[Tensor], Sequence[Stats], Sequence[Tensor | None]], list[Produced]]
    """``produce(inputs, known, seeds)``, with the statistics that are known and a seed for each output: the buffers of
    the operands and the statistics, as ``Encoder.encode`` returns them, and the matrix, if it is wanted. The device is
    the current one."""
    why_not: tuple[str | None, ...]
    """For each output why it is written and encoded in another run; None: one run computes and encodes it."""


def bind_producer(source: Source, outputs: Sequence[Output], group: str = "") -> Producer:
    """Choose and bind the kernel that computes all outputs, and encodes the outputs whose formats have sides for it. An
    encoder encodes the others. Where no kernel computes them, the source's definition does.

    Where the ranks of ``group`` have parts, the statistics that span ranks are measured and reduced before, in one
    collective; the source computes once to be measured and once to be encoded."""
    if len(outputs) != source.outputs:
        raise ValueError(f"{source.name} has {source.outputs} outputs, and {len(outputs)} are described")
    parts = [None if o.spec is None else bind_part(bind_encoder, o.spec, o.cut, group) for o in outputs]
    encoders = [None if part is None else part.encoder for part in parts]
    producer = _bound(source, outputs, encoders)
    spanning = [None if part is None else part.statistics for part in parts]
    if not any(spanning):
        return producer
    exchange, values = bind_exchange(spanning, group), _values(source, outputs)

    def produce(inputs: Sequence[Tensor], stats: Sequence[Stats], seeds: Sequence[Tensor | None]) -> list[Produced]:
        found, _ = exchange(values(inputs), None)
        stats = [KnownStats(own, state) if own else state for own, state in zip(found, stats, strict=True)]
        return producer.produce(inputs, stats, seeds)

    return producer._replace(produce=produce)


def producing(source: Source) -> BindEncoder:
    """A function that binds encoders of the one matrix that a source computes. They are given the inputs of the source
    in its place."""

    def bind(spec: EncoderSpec) -> Encoder:
        encoder = bind_encoder(spec)
        if spec.decoded:
            return encoder  # of a matrix that is there
        output = Output(spec)
        produce = bind_producer(source, [output]).produce

        def encode(inputs: Any, statistics: Stats, seed: Tensor | None) -> Encoded:
            ((of_row, of_col, stats, _),) = produce(inputs, (statistics,), (seed,))
            return of_row, of_col, stats

        if encoder.measure is None:
            return encoder._replace(encode=encode)
        values = _values(source, [output])
        return encoder._replace(encode=encode, values=lambda inputs: values(inputs)[0])

    return bind


def bind_halves(source: Source, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Values:
    """Bind the first outputs of a gated source, encoded in no format. Gate and up, and in backward their gradients, are
    halves of one matrix, of which ``shape`` is one half. Where no kernel computes them, the source's definition does.
    """
    kernels, n_values = kernels_of(source, shape, dtype, device), n_values_of_halves(source)
    if isinstance(kernels, str):
        return lambda halves, *others: torch.cat(source.compute(*halves.chunk(2, dim=1), *others)[:n_values], 1)
    return kernels.bind_halves(source, shape, dtype, device)


def _values(source: Source, outputs: Sequence[Output]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Bind the computation of the matrices that are encoded, by the instructions by which they are."""
    shape, dtype, device = _kind(outputs)
    kernels = kernels_of(source, shape, dtype, device)
    if isinstance(kernels, str):
        kinds = source.inputs
        return lambda inputs: list(
            source.compute(*(as_matrix(x) if kind == "matrix" else x for x, kind in zip(inputs, kinds, strict=True)))
        )
    run = kernels.bind(source, shape, dtype, device, [None] * len(outputs), [o.spec is not None for o in outputs])
    none: list[None] = [None] * len(outputs)
    return lambda inputs: [output.value for output in run(inputs, none, none)]  # type: ignore[misc]


def _kind(outputs: Sequence[Output]) -> tuple[tuple[int, int], torch.dtype, torch.device]:
    """The shape, dtype and device of all matrices."""
    first = next(output.spec for output in outputs if output.spec is not None)
    return first.shape, first.dtype, first.device


def _bound(source: Source, outputs: Sequence[Output], encoders: Sequence[Encoder | None]) -> Producer:
    """Bind a producer that is given all statistics which span ranks."""
    operands = tuple((None, None) if encoder is None else (encoder.row, encoder.col) for encoder in encoders)
    if all(output.spec is None for output in outputs):
        return _composed(source, outputs, encoders, operands, "nothing is encoded")
    shape, dtype, device = _kind(outputs)
    kernels = kernels_of(source, shape, dtype, device)
    if isinstance(kernels, str):
        return _composed(source, outputs, encoders, operands, kernels)
    tiles = [None if output.spec is None else _described(output, kernels) for output in outputs]
    described = [None if isinstance(tile, str) else tile for tile in tiles]
    reasons = tuple(tile if isinstance(tile, str) else None for tile in tiles)
    values = [output.value or reason is not None for output, reason in zip(outputs, reasons, strict=True)]
    run = kernels.bind(source, shape, dtype, device, described, values)
    others = [
        (i, encoder)
        for i, (encoder, why) in enumerate(zip(encoders, reasons, strict=True))
        if why is not None and encoder is not None
    ]
    if not others:
        return Producer(operands, run, reasons)

    def produce(inputs: Sequence[Tensor], stats: Sequence[Stats], seeds: Sequence[Tensor | None]) -> list[Produced]:
        results = run(inputs, [None if why is not None else k for k, why in zip(stats, reasons, strict=True)], seeds)
        for i, encoder in others:
            value = results[i].value
            assert value is not None
            results[i] = Produced(*encoder.encode(value, stats[i], seeds[i]), value if outputs[i].value else None)
        return results

    return Producer(operands, produce, reasons)


def _composed(
    source: Source,
    outputs: Sequence[Output],
    encoders: Sequence[Encoder | None],
    operands: tuple[tuple[Operand | None, Operand | None], ...],
    why: str,
) -> Producer:
    """Compute by the definition, and encode each output by itself."""

    def produce(inputs: Sequence[Tensor], stats: Sequence[Stats], seeds: Sequence[Tensor | None]) -> list[Produced]:
        results = []
        matrices = (as_matrix(x) if kind == "matrix" else x for x, kind in zip(inputs, source.inputs, strict=True))
        for x, output, encoder, own, seed in zip(
            source.compute(*matrices), outputs, encoders, stats, seeds, strict=True
        ):
            encoded = ((), (), ()) if encoder is None else encoder.encode(x, own, seed)
            results.append(Produced(*encoded, x if output.value else None))
        return results

    return Producer(operands, produce, (why,) * len(outputs))


def _described(output: Output, kernels: Kernels) -> Any:
    """Describe how a kernel encodes an output, which may be a part; a string says why none does."""
    assert output.spec is not None
    if output.cut is None:
        return _tiles(output.spec, kernels)
    if is_made_of_row(output.spec):
        return MADE_OF_ROW
    part = part_spec(output.spec, output.cut)
    place = placed(part.spec, output.cut)
    if place is None:
        return "its chunks have random bits of their own"
    if part.apart and (part.measures or output.spec.remembers):
        return "statistics for its state are exchanged before it is encoded"
    tiles = _tiles(place, kernels)
    if isinstance(tiles, str):
        return tiles
    return tiles._replace(recall=_exchanged if part.apart else bind_stats(output.spec))


def _exchanged(run: None, statistics: Any, seed: None) -> Sequence[Tensor]:
    """The statistics to encode with, of ``KnownStats``."""
    stats: Sequence[Tensor] = statistics.stats
    return stats


def _tiles(spec: EncoderSpec, kernels: Kernels) -> Any:
    """Describe how a kernel encodes a whole matrix, or one part of it by itself."""
    row, col = sides_of(spec)
    if is_made_of_row(spec):
        return MADE_OF_ROW
    if spec.sections is not None:
        return "its rows are encoded in sections"
    if spec.across and draws(row, col):
        return "kernels draw random bits from the first column on"
    if shared(row, col) and row is not None and row.stochastic:
        return "both operands have the same random bits"
    return kernels.operands(encoding_of(spec), bind_stats(spec))
