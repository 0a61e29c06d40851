"""Encoders of tensors of one shape, which a layer makes once and calls at every step.

A bound one has its kernels, launches and memory decided beforehand, and bypasses PyTorch's dispatcher. Where a compiler
traces or a mode watches, operators take its place; both give the same bytes. Only the encoder knows whether one operand
is made of the other, and what is kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer, Storage
from lpq.formats.layout import for_dtype
from lpq.formats.sections import Sections
from lpq.operations.binding import Encoded, Encoding, Operand
from lpq.operations.bound import bind_run
from lpq.operations.decoding import decode
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import exact_forms
from lpq.operations.group_tiles import dense
from lpq.operations.inputs import as_matrix
from lpq.operations.measuring import bind_measure, measure
from lpq.operations.multiplicands import multiplicands
from lpq.operations.quantizing import quantized
from lpq.operations.recoding import Recode, bind_recode
from lpq.operations.sectioned import same_amaxes
from lpq.operations.sides import declared, draws, shared
from lpq.operations.states import Recall, as_first_run, as_in_forward, bind_recall, moves, recall, recalls

State = Mapping[str, Tensor]
Stats = Any
"""The statistics that an encoder is given: a state that holds them, or a sequence of them, which may be empty."""


class Encoder(NamedTuple):
    """Encodes tensors of one shape."""

    row: Operand | None
    col: Operand | None
    """The operands that it makes."""
    encode: Callable[..., Encoded]
    """``encode(x, known, seed)``, for rows in groups also where these end: the buffers of both operands, and the
    statistics where they are measured for later use. The matrix is ``x`` with all leading dimensions as rows. The
    device is the current one."""
    later: Callable[[Any], Sequence[Tensor]] | None = None
    """Makes the buffers of the column operand from the tensors that ``encode`` returned in their place; None:
    ``encode`` returned the buffers."""
    derived: bool = False
    """Whether the column operand is made of the row operand."""
    begin: Callable[[Sequence[Tensor]], Any] | None = None
    """Begins, with the tensors that ``encode`` returned in place of the column operand, what ``later`` finishes: it
    travels meanwhile."""
    arrive: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None
    """Waits for the row operand that ``encode`` sent: takes the tensors that it returned in place of both operands, and
    returns the buffers of the row operand, and the tensors in place of the column operand; None: nothing was sent."""
    measure: Callable[[Tensor], list[Tensor]] | None = None
    """Measures a matrix for ``encode``, where that is given all statistics."""
    values: Callable[[Any], Tensor] | None = None
    """Makes the matrix of what ``encode`` is given, for ``measure``, where a source computes it; None: it is given."""
    taken: tuple[Direction, ...] = ()
    """The operands that ``encode`` takes of a tensor that is encoded already; none: it encodes."""

    def storages(self, row: Sequence[Tensor], col: Sequence[Tensor]) -> tuple[Storage | None, Storage | None]:
        """The operands over these buffers; None for an operand that it does not make."""
        of_row = None if self.row is None else self.row.storage(row)
        return of_row, None if self.col is None else self.col.storage(col)


class KnownStats(NamedTuple):
    """The statistics of a tensor that are known before it is encoded, and its state."""

    stats: list[Tensor]
    state: Any


class EncoderSpec(NamedTuple):
    """How a layer has tensors of one kind encoded."""

    quantizer: Quantizer
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    row: bool = True
    col: bool = True
    remembers: bool = False
    """Whether there is a state."""
    exact: tuple[bool, bool] = (False, False)
    """Whether the row operand, and the column operand, may be made in its exact form: it is multiplied at once."""
    later: bool = False
    """Whether the column operand is made when it is multiplied, so that a compiler decides what is kept until then."""
    always_takes_seed: bool = False
    """Whether the operator that makes the row operand is given the seed in any case. A compiler would draw in backward
    what forward has no use for."""
    measures: bool = False
    """Whether the statistics are returned though there is no state."""
    given: tuple[bool, ...] = ()
    """For each statistic whether it is given, where there is no state; empty: no statistic is given."""
    at_hand: bool = False
    """Whether the tensor is there before a step begins, as a weight is: no pass of a compiled graph makes it."""
    offset: int = 0
    """The first row of this tensor in the whole tensor, by which random bits are drawn; ``across`` is its first
    column."""
    across: int = 0
    apart: bool = False
    """Whether the statistics are measured apart, by ``Encoder.measure``, before they are given."""
    decoded: bool = False
    """Whether the tensor is the decoded row operand, of which the column operand is made."""
    compiled: bool = False
    """Whether a compiler traces the pass that makes the tensor."""
    sections: Sections | None = None
    """How the tensor is divided; None: it is one matrix. ``shape`` is the shape of all rows, or of one matrix of the
    stack."""


BindEncoder = Callable[[EncoderSpec], Encoder]
"""A function that makes an encoder: of kernels, or of operators."""


def bind_encoder(spec: EncoderSpec) -> Encoder:
    """Choose and bind the kernels of an encoding on this device."""
    if is_made_of_row(spec):
        first, recode = bind_encoder(first_of(spec)), None
        if not (spec.remembers or spec.measures or spec.given) and first.row is not None:
            recode = bind_recode(first.row, spec.quantizer.side("col"), spec.device)
        return made_of_row(first, bind_encoder(second_of(spec)), spec, recode)
    (row, col), forms = sides_of(spec), _forms(spec)
    if spec.across and draws(row, col):
        return through_operators(spec)  # kernels begin at the first column
    e = encoding_of(spec)
    run = bind_run(e)
    if spec.remembers:
        return Encoder(*operands_of(spec, forms), bind_recall(spec.quantizer, row, col, run))
    finds = bind_measure(row, col, spec.dtype, spec.device) if spec.apart else None
    return Encoder(*operands_of(spec, forms), run, measure=finds)


def encoding_of(spec: EncoderSpec) -> Encoding:
    """Describe to kernels how operands are encoded that are made of the tensor itself."""
    quantizer, shape, dtype, device, _, _, remembers = spec[:7]
    row, col = sides_of(spec)
    measures = spec.measures or (remembers and moves(quantizer, row, col))
    e = Encoding(row, col, shape, dtype, dtype, device, measure=measures, offset=spec.offset)
    if _forms(spec) != (None, None):
        e = e._replace(exact=spec.exact)
    if remembers:
        return e._replace(given=recalls(quantizer, row, col))
    if measures or spec.given:
        return e._replace(given=spec.given or (False,) * len(declared(row, col)))
    return e


def bind_stats(spec: EncoderSpec) -> Recall | None:
    """Return what finds, in a state, the statistics that an encoding is given; None: they are given themselves."""
    return bind_recall(spec.quantizer, *sides_of(spec), None) if spec.remembers else None


def through_operators(spec: EncoderSpec) -> Encoder:
    """Make the same encoder from operators, for a tracer or a mode."""
    if is_made_of_row(spec):
        return made_of_row(through_operators(first_of(spec)), through_operators(second_of(spec)), spec)
    quantizer, _, _, _, _, col = spec[:6]
    if spec.later and _can_be_later(spec):
        return in_two_steps(through_operators, spec)
    forms, sides = _forms(spec), sides_of(spec)
    row, side = sides
    # Dynamo of torch 2.11 cannot trace a comparison of tuples of forms.
    exact = spec.exact if forms[0] is not None or forms[1] is not None else (False, False)
    is_view = spec.later and col and quantizer.side("col").plain
    measures = spec.measures or (spec.remembers and moves(quantizer, *sides))

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None) -> Encoded:
        x = x.clone() if is_view else x  # as in ``in_two_steps``
        if spec.sections is None:
            x = as_matrix(x)
        if exact != (False, False) and row is not None and side is not None:
            pair = multiplicands(x, row, side, seed, exact)
            if pair is not None:
                return pair[0].tensors(), pair[1].tensors(), ()
        stats = statistics if spec.given else None
        if stats is None and spec.remembers and statistics:
            stats = recall(quantizer, *sides, as_first_run(statistics))
        return quantized(
            x, stats, *sides, seed, spec.offset, measure=measures, across=spec.across, at_hand=spec.at_hand,
            compiled=spec.compiled,
        )  # fmt: skip

    finds = partial(measure, row=sides[0], col=sides[1]) if spec.apart else None
    return Encoder(*operands_of(spec, forms), encode, measure=finds)


def is_made_of_row(spec: EncoderSpec) -> bool:
    return spec.col and spec.quantizer.col_source == "row" and not spec.decoded


def first_of(spec: EncoderSpec) -> EncoderSpec:
    """The encoding of the row operand, of which the column operand is made. It is measured, too, if the state of either
    operand moves."""
    row, col = spec.quantizer.side("row"), spec.quantizer.side("col")
    measures = spec.measures or (spec.remembers and moves(spec.quantizer, row, col))
    return spec._replace(row=True, col=False, later=False, measures=measures)


def second_of(spec: EncoderSpec) -> EncoderSpec:
    """The encoding of the decoded row operand into the column operand."""
    return spec._replace(row=False, dtype=torch.float32, later=False, decoded=True)


def made_of_row(first: Encoder, second: Encoder, spec: EncoderSpec, recode: Recode | None = None) -> Encoder:
    """Make the row operand by the first encoder, and the column operand of its codes by ``recode``. Without it, decode
    the row operand, and make the column operand of the decoded values by the second encoder."""
    of_row, of_col = first.row, second.col
    assert of_row is not None
    assert of_col is not None
    col = of_col._replace(dtype=spec.dtype)  # it stands for the tensor, and not for the decoded values
    column = column_of(of_row, second, spec)
    copies = spec.compiled and spec.remembers and len(of_col.quantizer.state) > 0

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None, *offs: Tensor) -> Encoded:
        row, _, stats = first.encode(x, statistics, seed, *offs)
        if recode is not None:
            return row if spec.row else (), recode(row), ()
        state = statistics.state if isinstance(statistics, KnownStats) else statistics
        if copies and state:
            state, row = as_in_forward(state, row)
        col_buffers, col_stats = column(row, state, seed)
        return (row, col_buffers, [*stats, *col_stats]) if spec.row else ((), col_buffers, col_stats)

    return Encoder(of_row if spec.row else None, col, encode, derived=True, measure=first.measure)


def of_delivered(bind: BindEncoder, spec: EncoderSpec) -> Encoder:
    """Take the row operand of a tensor that is encoded already, and make the column operand of it as ``made_of_row``
    does, but where it is multiplied, with the seed of the pass: of a weight that has no other (``made_at_use``), and of
    rows in groups, each encoded by itself. ``encode`` is given such a tensor, or the buffers of its operands."""
    spec = spec._replace(row=True)
    row, col = operands_of(spec)
    assert row is not None
    count, column = len(row.quantizer.layout) + int(row.in_groups), None
    if col is not None:
        second = bind(second_of(spec))
        assert second.col is not None
        col, column = second.col._replace(dtype=spec.dtype), column_of(row, second, spec)

    def encode(given: Any, statistics: Stats, seed: Tensor | None, *offs: Tensor) -> Encoded:
        buffers = *(given[0] if isinstance(given, tuple) else given.stored[0].tensors()), *offs
        kept = () if column is None else buffers if seed is None else (*buffers, seed)
        return buffers, kept, ()

    def later(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert column is not None
        return column(tensors[:count], (), tensors[count] if len(tensors) > count else None)[0]

    return Encoder(row, col, encode, None if column is None else later, derived=True, taken=("row",))


def column_of(
    row: Operand, second: Encoder, spec: EncoderSpec
) -> Callable[[Sequence[Tensor], Stats, Tensor | None], tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Return ``column(buffers, known, seed)``: the column operand that the second encoder makes of what a row operand
    decodes to, and the statistics that it returns."""
    layout, in_groups = spec.quantizer.side("col").layout, row.in_groups
    is_encoded = second.col is not None and second.col.form is None

    def column(
        buffers: Sequence[Tensor], statistics: Stats, seed: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if in_groups:
            x, offs = dense(row.grouped(buffers), buffers[-1], torch.float32, rotated=False), buffers[-1:]
        else:
            x, offs = decode(row.storage(buffers), torch.float32), ()
        _, col_buffers, stats = second.encode(x, statistics, seed, *offs)
        if is_encoded:
            col_buffers = *for_dtype(layout, col_buffers[: len(layout)], spec.dtype), *offs
        return col_buffers, stats

    return column


def in_two_steps(encoder: BindEncoder, spec: EncoderSpec) -> Encoder:
    """Encode the row operand now, keep the tensor, and make its column operand later, to the bit as it would be now:
    with the same random bits, with the statistics of the whole tensor, which are measured once, or with a copy of the
    present state, which another backward may move meanwhile.
    A compiler's partitioner places the second step where the fewest bytes are kept (``EncoderSpec.later``).
    """
    traced, row = spec.later, sides_of(spec)[0]
    draws, ends = rounds_stochastically(spec.quantizer), int(spec.sections is not None and not spec.sections.stack)
    keys = tuple(spec.quantizer.new_state("meta")) if spec.remembers else ()
    now, then_made = one_by_one(spec)
    moving, once = now.col, bool(then_made.given)
    first, second = encoder(now), encoder(then_made)

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None, *offs: Tensor) -> Encoded:
        # A compiler merges equal operators, and no operators that are given different seeds.
        takes_seed = not traced or spec.always_takes_seed or (row is not None and row.stochastic)
        of_row, _, stats = first.encode(x, statistics, seed if takes_seed else None, *offs)
        then = [statistics[key].clone() for key in keys] if keys else stats if once else ()
        seeds = (seed,) if draws and seed is not None else ()
        # A later write to x, if it is traced too, would change what backward reads. Inductor takes the copy away.
        return of_row, (x.clone() if traced else x, *offs, *seeds, *then), stats if moving else ()

    def later(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        offs, rest = tensors[1 : 1 + ends], tensors[1 + ends :]
        seed, then = (rest[0], rest[1:]) if draws else (None, rest)
        statistics = dict(zip(keys, then, strict=True)) if keys else then if once else ()
        # All of x, by way of an operator that the partitioner takes for fusible and Inductor for a view: it makes
        # nothing again that others read in backward.
        x = as_matrix(tensors[0]).chunk(1, dim=1)[0] if traced else tensors[0]
        return second.encode(x, statistics, seed, *offs)[1]

    return Encoder(first.row, second.col, encode, later, second.derived)


def one_by_one(spec: EncoderSpec) -> tuple[EncoderSpec, EncoderSpec]:
    """The encodings of the row operand now, and of the column operand later. The second is given the statistics that
    the first measures, where both operands have the same, of the whole tensor."""
    (row, col), (forward, backward) = sides_of(spec), spec.exact
    assert col is not None
    needs_row = not backward and bool(col.stochastic) and shared(row, col)  # those random bits are the row operand's
    # The statistics of both operands are measured now.
    moving = spec.measures or (spec.remembers and moves(spec.quantizer, row, col))
    stats = col.stats if shared(row, col) else []
    same = len(stats) > 0 and all(stat.block == (None, None) for stat in stats)
    if spec.sections is not None:
        same = spec.sections.stack and row is not None and same_amaxes(row, col)
    once = same and not spec.remembers and spec.quantizer.col_source == "original"
    given, spec = (True,) * len(col.stats) if once else (), spec._replace(later=False)
    first = spec._replace(col=moving, measures=once or spec.measures, exact=(forward, False))
    return first, spec._replace(row=needs_row, given=given, measures=False, exact=(False, backward))


def _can_be_later(spec: EncoderSpec) -> bool:
    """Whether there is a column operand that an operator of its own can make, from the tensor alone."""
    row, col = sides_of(spec)
    if col is None or col.plain or spec.remembers:
        return False
    return not (shared(row, col) and col.stochastic)  # those random bits are the row operand's


def sides_of(spec: EncoderSpec) -> tuple[Quantizer | None, Quantizer | None]:
    """The quantizers of the row operand and of the column operand; None for an operand that is not made."""
    quantizer = spec.quantizer
    return quantizer.side("row") if spec.row else None, quantizer.side("col") if spec.col else None


def _forms(spec: EncoderSpec) -> tuple[Form | None, Form | None]:
    """The exact forms in which the operands are made: None where statistics are returned for a state."""
    row, col = sides_of(spec)
    if spec.exact == (False, False) or spec.remembers or spec.measures or row is None or col is None:
        return None, None
    return exact_forms(row, col, spec.shape, spec.exact, spec.device) or (None, None)


def operands_of(
    spec: EncoderSpec, forms: tuple[Form | None, Form | None] = (None, None)
) -> tuple[Operand | None, Operand | None]:
    """Return the operands of a tensor, by this encoder."""
    (rows, cols), dtype, sections = spec.shape, spec.dtype, spec.sections
    count = (sections.number,) if sections is not None and sections.stack else ()
    row, col = sides_of(spec)
    return (
        Operand(row, (*count, rows, cols), dtype, forms[0], sections) if row is not None else None,
        Operand(col, (*count, cols, rows), dtype, forms[1], sections, int(sections is not None))
        if col is not None else None,
    )  # fmt: skip
