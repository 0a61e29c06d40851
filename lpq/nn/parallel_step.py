"""A step of a layer whose weight tensor parallelism shards: the encoders and products of a plain layer, for parts.

Each rank multiplies its own parts. A statistic that spans parts is reduced over the ranks, so every code and every
scale is as in one process. A gathered operand travels encoded; a sum over the ranks begins where its product is made.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from lpq.distributed.overlapped import of_parts
from lpq.distributed.part_gathers import bind_gathered_high, gathering, sent_part, summed
from lpq.formats.format import Quantizer
from lpq.nn.encoded_inputs import SUMMED, of_given, why_no_gradient
from lpq.nn.plan import Plan
from lpq.nn.step import BindProduct, Exchange, Shapes, Step, bind_products, gradient_spec, input_spec, weight_spec
from lpq.operations.binding import Multiply
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import BindEncoder, Encoder, EncoderSpec, bind_encoder, of_delivered, sides_of
from lpq.operations.part_encoders import PartEncoder, SpanningStats, along, bind_exchange, bind_part, bind_settle
from lpq.operations.reduce_statistics import spans
from lpq.operations.states import moves
from lpq.torch_private.collectives import finish


class SharedOut(NamedTuple):
    """How a layer is sharded over the ranks of a group: the rows of its weight, and with them the columns of its
    output; or the columns of its weight and of its input, and then the output is the sum over the ranks."""

    group: str
    weight: Cut
    """Along rows (0) or columns (1)."""
    sequence: Cut | None = None
    """How ranks divide the rows of the input, which is gathered, or the rows of the sum."""
    high: bool = False
    """Whether the gradient of the sum is gathered before it is encoded."""
    sums: bool = True
    """Whether the sum over the ranks, of the output or of dx, is made here. Siblings sum their dx together."""
    overlaps: bool = False
    """Whether an input that is gathered is multiplied as its parts arrive."""
    keeps: bool = False
    """Whether its whole row operand is kept nevertheless, for siblings."""
    adds_bias: bool = False
    """Whether a bias that trains is added to the sum, so that the gradient of the result is summed as well."""

    def cut_of(self, tensor: str) -> Cut | None:
        """How ``x``, ``w`` or ``dy`` is divided over ranks; None: each has the whole."""
        if self.weight.dim == 0:
            return {"x": self.sequence, "w": self.weight, "dy": self.weight._replace(dim=1)}[tensor]
        return {"x": self.weight, "w": self.weight, "dy": None if self.high else self.sequence}[tensor]

    def step(self, plan: Plan, shapes: Shapes, encoder: BindEncoder, product: BindProduct) -> Step:
        """Bind a step by these functions."""
        group, sequence, by_columns = self.group, self.sequence, self.weight.dim == 0
        x = input_spec(plan, shapes)
        if shapes.taken:
            of_x = _produced(x, self.cut_of("x"))
        else:
            of_x = bind_part(encoder, sent_part(x) if by_columns and sequence else x, self.cut_of("x"), group)
        if by_columns and sequence is not None:
            of_x = gathering(of_x, encoder, x, sequence, group, at_once=False, begin=not self.overlaps)
        of_w, of_dy = self._weight(plan, shapes, encoder), self._gradient(plan, shapes, encoder)
        if shapes.compiled:
            # A compiler merges collectives of layers that are given the same input, and so all that follows from them.
            of_x = of_x.alone(group)
        exchange = self._exchange(plan, None if shapes.given else of_x.statistics, of_w.statistics)
        forward, into_dx, into_dw = self._products(plan, shapes, of_x.encoder, of_w.encoder, of_dy.encoder, product)
        w_given = shapes.encoded and not plan.w_at_use
        encoders = of_x.encoder, None if w_given else of_w.encoder, of_dy.encoder
        return Step(
            *encoders, forward, into_dx, into_dw, self._refuses(plan, shapes), exchange,
            bind_settle((of_x, of_w, of_dy), group) if plan.moving else None,
            finish_dx=finish if by_columns and self.sums else None,
        )  # fmt: skip

    def named(self, *, sized: bool) -> tuple[Any, ...]:
        """The function ``shared_out`` and its values; not ``sized``: for sequences of any length."""
        cut = self.sequence
        if cut is not None and not sized:
            cut = cut._replace(size=1, chunks_per_rank=2 if cut.chunks_per_rank > 1 else 1)
        rest = self.high, self.sums, self.overlaps, self.keeps, self.adds_bias
        return "lpq.nn.parallel_step:shared_out", self.group, self.weight[:], None if cut is None else cut[:], *rest

    def gradient(self, plan: Plan, shapes: Shapes) -> EncoderSpec:
        """How this rank's part of the gradient of the result is encoded."""
        spec, ranks = gradient_spec(plan, shapes), self.weight.ranks
        if self.sequence is None:
            return spec
        rows = shapes.rows * ranks if self.weight.dim == 0 else shapes.rows // ranks
        return spec._replace(shape=(rows, shapes.outputs))

    def computed(self, plan: Plan, shapes: Shapes, step: Step, bind: BindEncoder) -> Step:
        """The same step with another encoder of ``x``, by ``bind``, which is not gathered: of what a source
        computes."""
        of_x = bind_part(bind, input_spec(plan, shapes), self.cut_of("x"), self.group)
        of_w = self._weight(plan, shapes, bind_encoder)
        return step._replace(x=of_x.encoder, exchange=self._exchange(plan, of_x.statistics, of_w.statistics))

    def _weight(self, plan: Plan, shapes: Shapes, encoder: BindEncoder) -> PartEncoder:
        spec, cut, group = weight_spec(plan, shapes), self.weight, self.group
        if not shapes.encoded:
            return bind_part(encoder, spec, cut, group)
        if not plan.w_at_use:
            return PartEncoder(of_given(spec))
        return PartEncoder(
            of_delivered(lambda part: bind_part(encoder, part, cut, group, early=True).alone(group).encoder, spec)
        )

    def _gradient(self, plan: Plan, shapes: Shapes, encoder: BindEncoder) -> PartEncoder:
        spec, sequence, group = self.gradient(plan, shapes), self.sequence, self.group
        if self.high:
            assert sequence is not None
            return PartEncoder(bind_gathered_high(encoder, spec, sequence, group))
        gathered = sequence if self.weight.dim == 1 else None
        part = spec if gathered is None else sent_part(spec)
        if shapes.arrived:
            of_part = PartEncoder(of_given(part))
        else:
            of_part = bind_part(encoder, part, self.cut_of("dy"), group)
        if gathered is not None:
            of_part = gathering(of_part, encoder, spec, gathered, group, at_once=True)
        return of_part.alone(group)

    def _refuses(self, plan: Plan, shapes: Shapes) -> str | None:
        """Why the gradient of the result may not arrive encoded; None: it may, this rank's part by itself."""
        if self.adds_bias:
            return SUMMED
        if self.high:
            return "the ranks' parts of it are gathered before they are encoded"
        sides = {"row": shapes.needs_dx, "col": shapes.needs_dw}
        return why_no_gradient(plan) or why_not_by_itself(plan.dy, self.cut_of("dy"), **sides)

    def _exchange(self, plan: Plan, *statistics: SpanningStats | None) -> Exchange | None:
        """Bind what reduces the statistics of x and w; None if there are neither statistics nor seeds."""
        reduces = any(one is not None for one in statistics) or plan.stochastic
        return bind_exchange(statistics, self.group) if reduces else None

    def _products(
        self, plan: Plan, shapes: Shapes, x: Encoder, w: Encoder, dy: Encoder, product: BindProduct
    ) -> tuple[Multiply, Multiply | None, Multiply | None]:
        group, sequence, by_columns, forward = self.group, self.sequence, self.weight.dim == 0, None
        if by_columns and sequence is not None and self.overlaps and not shapes.given:
            size = shapes.rows, shapes.features
            forward = partial(of_parts, size=size, cut=sequence, group=group, whole=self.keeps)
        operands = (x.row, x.col), (w.row, w.col), (dy.row, dy.col)
        multiply, into_dx, into_dw = bind_products(plan, shapes, *operands, product, forward)
        if not by_columns and self.sums:
            multiply = summed(multiply, sequence, group, finished=True)
        if by_columns and self.sums and into_dx is not None:
            into_dx = summed(into_dx, sequence, group, finished=False)
        return multiply, into_dx, into_dw


def shared_out(group: str, weight: tuple[int, ...], sequence: tuple[int, ...] | None, *rest: bool) -> SharedOut:
    """Make it of plain values."""
    return SharedOut(group, Cut(*weight), None if sequence is None else Cut(*sequence), *rest)


def why_not_by_itself(quantizer: Quantizer, cut: Cut | None, *, row: bool, col: bool) -> str | None:
    """Why a rank's part of a tensor may not have been encoded by itself into these operands, so that a layer does not
    take it; None if it may: it is the same part of the encoded whole, or there is no cut."""
    if cut is None:
        return None
    if rounds_stochastically(quantizer):
        return f"{quantizer.text} rounds with random bits, by the place of each rank's part"
    row = row or quantizer.col_source == "row"
    of_row, of_col = quantizer.side("row") if row else None, quantizer.side("col") if col else None
    for declared in along(cut, of_row, of_col):
        if spans(declared):
            return (
                f"{declared[0].name} of {quantizer.text} is of the parts of all ranks together: whether it was reduced "
                "over these ranks cannot be told"
            )
    return None


def _produced(spec: EncoderSpec, cut: Cut | None) -> PartEncoder:
    """The encoder of parts that a producer has encoded: by the state, if there is one, which then remembers what was
    measured of the part alone."""
    moving = spec.remembers and moves(spec.quantizer, *sides_of(spec))
    return PartEncoder(of_given(spec), measured=along(cut, *sides_of(spec)) if moving else ())
