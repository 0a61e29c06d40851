"""A step of a layer whose weight tensor parallelism shards: the encoders and products of a plain layer, for parts.

Each rank multiplies its own parts. A statistic that spans parts is reduced over the ranks, so every code and every
scale is as in one process. A gathered operand travels encoded; a sum over the ranks begins where its product is made.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from lpq.distributed.overlapped import of_parts
from lpq.distributed.part_gathers import (
    bind_gathered_high,
    finish_sum,
    gathering,
    sent_part,
    summed,
)
from lpq.nn.encoded_inputs import of_given
from lpq.nn.plan import Plan
from lpq.nn.step import BindProduct, Exchange, Shapes, Step, bind_products, gradient_spec, input_spec, weight_spec
from lpq.operations.binding import Multiply
from lpq.operations.cut import Cut
from lpq.operations.encoder import BindEncoder, Encoder, EncoderSpec, bind_encoder, of_delivered, sides_of
from lpq.operations.part_encoders import PartEncoder, SpanningStats, along, bind_exchange, bind_part, bind_settle
from lpq.operations.states import moves

SHARED_OUT = "tensor parallelism shards the layer: whether it was encoded by statistics of all ranks cannot be told"


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

    def cut_of(self, tensor: str) -> Cut | None:
        """How ``x``, ``w`` or ``dy`` is divided over ranks; None: each has the whole."""
        if self.weight.dim == 0:
            return {"x": self.sequence, "w": self.weight, "dy": self.weight._replace(dim=1)}[tensor]
        return {"x": self.weight, "w": self.weight, "dy": None if self.high else self.sequence}[tensor]

    def step(self, plan: Plan, shapes: Shapes, encoder: BindEncoder, product: BindProduct) -> Step:
        """Bind a step by these functions."""
        group, cut, sequence, by_columns = self.group, self.weight, self.sequence, self.weight.dim == 0
        x, dy = input_spec(plan, shapes), self.gradient(plan, shapes)
        gathers = sequence is not None and by_columns
        if shapes.taken:
            of_x = _produced(x, self.cut_of("x"))
        else:
            of_x = bind_part(encoder, sent_part(x) if gathers else x, self.cut_of("x"), group)
        if sequence is not None and by_columns:
            of_x = gathering(of_x, encoder, x, sequence, group, at_once=False, begin=not self.overlaps)
        of_w = self._weight(plan, shapes, encoder)
        if by_columns:
            of_dy = bind_part(encoder, dy, cut._replace(dim=1), group).alone(group)
        elif sequence is None or self.high:
            of_dy = PartEncoder(encoder(dy) if sequence is None else bind_gathered_high(encoder, dy, sequence, group))
        else:
            of_dy = bind_part(encoder, sent_part(dy), sequence, group)
            of_dy = gathering(of_dy, encoder, dy, sequence, group, at_once=True).alone(group)
        if shapes.compiled:
            # A compiler merges collectives of layers that are given the same input, and so all that follows from them.
            of_x = of_x.alone(group)
        exchange = self._exchange(plan, None if shapes.given else of_x.statistics, of_w.statistics)
        forward, into_dx, into_dw = self._products(plan, shapes, of_x.encoder, of_w.encoder, of_dy.encoder, product)
        w_given = shapes.encoded and not plan.w_at_use
        encoders = of_x.encoder, None if w_given else of_w.encoder, of_dy.encoder
        return Step(
            *encoders, forward, into_dx, into_dw, SHARED_OUT, exchange,
            bind_settle((of_x, of_w, of_dy), group) if plan.moving else None,
            finish_dx=finish_sum if by_columns and self.sums else None,
        )  # fmt: skip

    def named(self, *, sized: bool) -> tuple[Any, ...]:
        """The function ``shared_out`` and its values; not ``sized``: for sequences of any length."""
        cut = self.sequence
        if cut is not None and not sized:
            cut = cut._replace(size=1, chunks_per_rank=2 if cut.chunks_per_rank > 1 else 1)
        rest = self.high, self.sums, self.overlaps, self.keeps
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


def _produced(spec: EncoderSpec, cut: Cut | None) -> PartEncoder:
    """The encoder of parts that a producer has encoded: by the state, if there is one, which then remembers what was
    measured of the part alone."""
    moving = spec.remembers and moves(spec.quantizer, *sides_of(spec))
    return PartEncoder(of_given(spec), measured=along(cut, *sides_of(spec)) if moving else ())
