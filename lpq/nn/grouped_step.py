"""The step of a grouped layer: encoders and products of groups, decided once, whatever their number."""

from __future__ import annotations

from typing import Any, NamedTuple

from lpq.formats.format import Quantizer
from lpq.formats.sections import Sections, why_not_row_by_row
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step, bind_step, gradient_spec, input_spec, weight_spec
from lpq.operations import group_products
from lpq.operations import groups as in_groups
from lpq.operations.encoder import BindEncoder, EncoderSpec, operands_of
from lpq.operations.group_choice import decoded_at_once
from lpq.operations.group_tiles import spans


class Groups(NamedTuple):
    """Rows in groups, each multiplied by a matrix of its own: how the tensors of a step are divided."""

    number: int
    at_once: bool
    """Whether the device computes all groups at once, by bound kernels, and nothing watches forward."""

    def step(self, plan: Plan, s: Shapes, encoder: object, product: object) -> Step:
        """Bind encoders and products of groups."""
        needs_dx, needs_dw = s.needs_dx, s.needs_dw
        rows, stack = (Sections(self.number, is_stack, self.at_once) for is_stack in (False, True))
        x, dy = (spec(plan, s)._replace(sections=rows) for spec in (input_spec, gradient_spec))
        w = weight_spec(plan, s)._replace(sections=stack)
        fprop, dgrad, wgrad = self._decoded(plan, x, w, dy)
        keeps_input = plan.keeps_input and needs_dw
        # Decoding the weight's column operand takes backward as long as making it anew of the weight, which is there,
        # and of the weight's row operand, where a rotation would be undone for each matrix by itself.
        anew = plan.w.col_source == "original" or plan.w.side("col").rotation is not None
        keeps_weight = (plan.keeps_weight or (dgrad and anew and not _finds_lines(plan.w))) and needs_dx
        # A scale of a whole group is not decoded along lines, nor is a rotation undone so: such an operand is made
        # decoded now.
        of_lines = plan.x.side("col")
        x_decoded = wgrad and not keeps_input and (spans(of_lines, 1) or of_lines.rotation is not None)
        if s.watched:  # then both operands of a product are decoded, or neither is
            dgrad, wgrad = False, x_decoded
        bind: BindEncoder = in_groups.through_operators if s.watched else in_groups.bind_encoder
        multiply = group_products.through_operators if s.watched else group_products.bind
        x = x._replace(exact=(fprop, wgrad if keeps_input else x_decoded))
        if not s.encoded:
            w = w._replace(exact=(fprop, dgrad and keeps_weight))
        dy = dy._replace(exact=(dgrad, wgrad))
        reason = why_not_row_by_row(plan.dy)
        told = f"groups of rows are not what dy={plan.dy} makes of all together: {reason}"
        refuses = told if reason is not None else None  # torch 2.11 traces no branch on a text that it formats
        return bind_step(plan, s, (x, w, dy), (keeps_input, keeps_weight), bind, multiply, refuses)

    def named(self, *, sized: bool) -> tuple[Any, ...]:
        """The class and its values, among which is no size of a pass."""
        return "lpq.nn.grouped_step:Groups", self.number, self.at_once

    def _decoded(self, plan: Plan, x: EncoderSpec, w: EncoderSpec, dy: EncoderSpec) -> tuple[bool, bool, bool]:
        """Whether the operands of each product are made decoded, in bf16."""
        if not self.at_once:
            return False, False, False
        (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (
            operands_of(spec._replace(row=True, col=True)) for spec in (x, w, dy)
        )
        products: Any = (x_row, w_row), (dy_row, w_col), (dy_col, x_col)
        fprop, dgrad, wgrad = (decoded_at_once(a, b, x.device) for a, b in products)
        # Column operands are made of codes.
        of_codes = plan.dy.col_source == "row", "row" in (plan.x.col_source, plan.w.col_source)
        return fprop and not of_codes[1], dgrad and not of_codes[0], wgrad


def _finds_lines(quantizer: Quantizer) -> bool:
    """Whether the column operand needs amaxes of whole lines, and so one more read, but can be decoded at once."""
    side = quantizer.side("col")
    whole = any(buffer.block[0] is None for buffer in side.layout)
    return not whole and any(stat.block[1] is None for stat in side.stats)
