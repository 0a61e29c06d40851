"""Encoders of a rank's part of a matrix: measure, exchange with the other ranks, encode.

They are bound as encoders of whole matrices are, to kernels or to operators, and used in the same steps. The statistics
that span ranks may be exchanged for several tensors together, before any is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.formats.sections import cat
from lpq.operations.binding import Encoded
from lpq.operations.cut import Cut
from lpq.operations.encoder import (
    BindEncoder,
    Encoder,
    EncoderSpec,
    KnownStats,
    Stats,
    first_of,
    is_made_of_row,
    made_of_row,
    second_of,
    sides_of,
)
from lpq.operations.inputs import as_matrix
from lpq.operations.measuring import measure_again
from lpq.operations.reduce_statistics import Declared, bind_reduction, spans
from lpq.operations.sides import declared, draws, measures_again
from lpq.operations.states import as_first_run, bind_recall, moves, recalls

Seeds = Tensor | None


class SpanningStats(NamedTuple):
    """The statistics of a part that ranks exchange before it is encoded."""

    measure: Callable[[Tensor], list[Tensor]]
    needed: Sequence[Declared]
    row: Quantizer | None
    col: Quantizer | None
    """The operands that need them."""
    values: Callable[[Any], Tensor] | None = None
    """Makes the matrix of what the encoder is given, where a source computes it; None: it is given."""


class PartEncoder(NamedTuple):
    """An encoder of a part, which is given ``KnownStats`` if there are statistics to exchange."""

    encoder: Encoder
    statistics: SpanningStats | None = None
    measured: Sequence[Declared] = ()
    """The returned statistics that cover this part alone, since it encodes with the statistics of a state."""

    def alone(self, group: str) -> PartEncoder:
        """Make an encoder that measures and exchanges by itself; it is given a state, or nothing."""
        encoder, statistics, measured = self
        if statistics is None:
            return self
        exchange = bind_exchange([statistics], group)

        def encode(x: Tensor, state: Stats, seed: Tensor | None) -> Encoded:
            (stats,), _ = exchange([x], None)
            return encoder.encode(x, KnownStats(stats, state), seed)

        return PartEncoder(encoder._replace(encode=encode), measured=measured)


def bind_settle(
    parts: Sequence[PartEncoder], group: str
) -> Callable[[Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]] | None:
    """``settle(measured)``: reduce what the encoders returned of parts alone, in one collective, before states remember
    it; None if there is nothing to reduce."""
    if not any(spans(one) for part in parts for one in part.measured):
        return None
    reduce = bind_reduction([part.measured for part in parts], group, 1)

    def settle(measured: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        stats = [[*one] for one in measured]
        reduce(stats, None)
        return stats

    return settle


def bind_exchange(
    parts: Sequence[SpanningStats | None], group: str
) -> Callable[[Sequence[Tensor], Seeds], tuple[list[list[Tensor]], Seeds]]:
    """``exchange(xs, seeds)``: measure these parts and reduce their statistics over the ranks, with the seeds of the
    pass, in one collective, one more for counts, and the same again for a second round. It returns the statistics of
    each part, which are none where it is None as it has nothing to exchange, and the seeds that all ranks have."""
    needed = [[] if part is None else part.needed for part in parts]
    reduce, again = bind_reduction(needed, group, 1), None
    if any(part is not None and measures_again(part.row, part.col) for part in parts):
        again = bind_reduction(needed, group, 2)

    def exchange(xs: Sequence[Tensor], seeds: Seeds) -> tuple[list[list[Tensor]], Seeds]:
        matrices = [
            x if part is None else part.values(x) if part.values is not None else x if x.dim() == 2 else as_matrix(x)
            for part, x in zip(parts, xs, strict=True)
        ]
        stats = [[] if part is None else [*part.measure(x)] for part, x in zip(parts, matrices, strict=True)]
        seeds = reduce(stats, seeds)
        if again is not None:
            for i, (part, x) in enumerate(zip(parts, matrices, strict=True)):
                if part is not None and measures_again(part.row, part.col):
                    stats[i] = [*measure_again(x, part.row, part.col, stats[i])]
            again(stats, None)
        return stats, seeds

    return exchange


class PartSpec(NamedTuple):
    """How a part is encoded when the statistics that span ranks are known: by given statistics, and no state."""

    spec: EncoderSpec
    needed: Sequence[Declared] = ()
    apart: bool = False
    """Whether all statistics are exchanged before, so that ``KnownStats`` are known."""
    measures: bool = False
    """Whether the statistics are returned."""


def part_spec(spec: EncoderSpec, cut: Cut, *, early: bool = False) -> PartSpec:
    """Describe how a part is encoded whose column operand is not made of the row operand. ``early``: as for
    ``bind_part``."""
    quantizer, (row, col) = spec.quantizer, sides_of(spec)
    needed = along(cut, row, col)
    if not spec.remembers and not any(map(spans, needed)):
        return PartSpec(spec)
    recalled = recalls(quantizer, row, col) if spec.remembers else (False,) * len(needed)
    measures = spec.measures or (spec.remembers and moves(quantizer, row, col))
    apart = any(spans(one) and not is_recalled for one, is_recalled in zip(needed, recalled, strict=True))
    if measures and not apart:  # encoding measures on the way, if it does so once for the part
        apart = early or measures_again(row, col) or (cut.chunks_per_rank > 1 and draws(row, col))
    is_given = (True,) * len(needed) if apart else recalled if True in recalled else ()
    spec = spec._replace(remembers=False, measures=measures and not apart, given=is_given, apart=apart)
    return PartSpec(spec, needed, apart, measures)


def bind_part(bind: BindEncoder, spec: EncoderSpec, cut: Cut | None, group: str, *, early: bool = False) -> PartEncoder:
    """Bind, by ``bind``, the encoder of a part of these sizes; without a cut, of the whole. ``early``: the statistics
    for the state are exchanged before the part is encoded, though the state has all that encoding needs."""
    if cut is None:
        return PartEncoder(bind(spec))
    if is_made_of_row(spec):
        first = bind_part(bind, first_of(spec), cut, group, early=True)
        second = bind_part(bind, second_of(spec), cut, group, early=True).alone(group)
        return PartEncoder(made_of_row(first.encoder, second.encoder, spec), first.statistics)
    part = part_spec(spec, cut, early=early)
    encoder = _placed(bind, part.spec, cut)
    if not part.needed:
        return PartEncoder(encoder)

    (within, needed, apart, measures), remembers = part, spec.remembers
    recall = bind_recall(spec.quantizer, *sides_of(spec), None)

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None) -> Encoded:
        stats, state = statistics if apart else ((), statistics)
        use = stats
        if remembers and state:
            state = as_first_run(state) if spec.compiled else state
            use = [None if k is None else k.contiguous() for k in recall(None, state, None)]
            if apart:
                use = [s if k is None else k for k, s in zip(use, stats, strict=True)]
        of_row, of_col, new_stats = encoder.encode(x, use, seed)
        return of_row, of_col, stats if measures and apart else new_stats

    spanning = None
    if encoder.measure is not None:
        spanning = SpanningStats(encoder.measure, needed, *sides_of(spec), encoder.values)
    return PartEncoder(encoder._replace(encode=encode), spanning, needed if within.measures else ())


def along(cut: Cut | None, row: Quantizer | None, col: Quantizer | None) -> list[Declared]:
    """The statistics that these operands of a part need, each with the dimension that is divided over ranks; without a
    cut none."""
    if cut is None:
        return []
    return [(stat, own if cut.dim == 0 else 1 - own) for stat, own in declared(row, col)]


def placed(spec: EncoderSpec, cut: Cut) -> EncoderSpec | None:
    """The same encoding, which draws random bits, if it does, by the place of the part in the whole; None if chunks of
    the part have places of their own."""
    if not draws(*sides_of(spec)):
        return spec
    if cut.dim == 1:
        return spec._replace(across=cut.place(0))
    return spec._replace(offset=spec.offset + cut.place(0)) if cut.chunks_per_rank == 1 else None


def _placed(bind: BindEncoder, spec: EncoderSpec, cut: Cut) -> Encoder:
    """Bind an encoder of a part, or of each of its chunks."""
    if (place := placed(spec, cut)) is not None:
        return bind(place)
    sides = sides_of(spec)
    (_, cols), needed = spec.shape, declared(*sides)
    places = [spec._replace(shape=(cut.size, cols), offset=cut.place(i)) for i in range(cut.chunks_per_rank)]
    encoders, whole = [bind(place) for place in places], bind(spec)

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None) -> Encoded:
        """Encode each chunk with the random bits of its own place."""
        operands = []
        for i, (chunk, encoder) in enumerate(zip(torch.split(as_matrix(x), cut.size), encoders, strict=True)):
            pairs = zip(needed, statistics, strict=True) if statistics else ()
            own = [None if s is None else of_rows(one, s, i * cut.size, cut.size) for one, s in pairs]
            of_row, of_col, _ = encoder.encode(chunk, own, seed)
            operands.append(encoder.storages(of_row, of_col))
        rows, cols = zip(*operands, strict=True)
        return _joined(rows, 0), _joined(cols, 1), ()

    return whole._replace(encode=encode)


def _joined(parts: Sequence[Storage | None], dim: int) -> Sequence[Tensor]:
    joined = cat([part for part in parts if part is not None], dim, agreed=True) if None not in parts else None
    return () if joined is None else joined.tensors()


def of_rows(declared: Declared, stat: Tensor, start: int, count: int) -> Tensor:
    """A statistic of some rows of a tensor, which cut no block."""
    step, dim = declared[0].block[declared[1]], declared[1]
    if step is None:
        return stat
    return stat.narrow(dim, start // step, count // step).contiguous()
