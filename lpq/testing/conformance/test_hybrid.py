"""With every built-in format on the other side: a hybrid's operands are its formats' own, and it trains."""

from __future__ import annotations

import torch

import lpq
from lpq.formats import Quantizer
from lpq.nn import Linear
from lpq.recipes import recipe
from lpq.testing.conformance.test_linear import K, N, train
from lpq.testing.expect import same_operand, same_quantized
from lpq.testing.operands import SEED, cut, no_parts, normal, sides
from lpq.testing.options import Family


def hybrid(row: Quantizer, col: Quantizer, **options: object) -> Quantizer:
    return lpq.quantizer("hybrid", row=row, col=col, **options)


def test_each_side_is_the_format_itself(quantizer: Quantizer, partner: str) -> None:
    """The row operand of ``hybrid(row=A, col=B)`` is A's and its column operand B's, bit for bit."""
    x, other = normal(40, 96), lpq.quantizer(partner)
    for row, col in ((quantizer, other), (other, quantizer)):
        both = hybrid(row, col)
        tensor = both.quantize(x, seed=SEED)
        for direction, side in (("row", row), ("col", col)):
            expected = side.quantize(x, row=direction == "row", col=direction == "col", seed=SEED)
            if side.col_source == "row" and direction == "col":
                continue
            operand, reference = getattr(tensor, direction), getattr(expected, direction)
            same_operand(operand, reference, f"{both}: the {direction} operand")


def test_both_sides_alike_are_the_format(quantizer: Quantizer) -> None:
    """``hybrid(row=A, col=A)`` holds what A holds."""
    if quantizer.col_source == "row":
        return
    x = normal(40, 96)
    tensor, expected = hybrid(quantizer, quantizer).quantize(x, seed=SEED), quantizer.quantize(x, seed=SEED)
    for direction, operand in expected.operands:
        same_operand(tensor.operand(direction), operand, f"hybrid of {quantizer} twice, {direction} operand")


def test_column_operand_from_the_row_operand(family: Family, partner: str) -> None:
    """``col_source=row`` encodes the column operand from the decoded row operand."""
    x, other = normal(40, 96), lpq.quantizer(partner)
    tensor = hybrid(family.default, other, col_source="row").quantize(x, seed=SEED)
    decoded = family.default.quantize(x, col=False, seed=SEED).dequantize()
    expected = other.quantize(decoded, row=False, seed=SEED)
    same_operand(tensor.operand("col"), expected.operand("col"), f"{family.default} → {other}")


def test_pairs_train(family: Family, partner: str) -> None:
    """This format forward and the other one backward, and the other way round."""
    for forward, backward in (
        (family.default, lpq.quantizer(partner)),
        (lpq.quantizer(partner), family.default),
    ):
        parts = {"fprop": forward.side("row"), "dgrad": backward.side("row"), "wgrad": backward.side("row")}
        layer = Linear(K, N, recipe=recipe(parts))
        losses = train(layer)
        assert losses[-1] < 0.7 * losses[0], (
            f"{forward} forward, {backward} backward: the loss of a linear task went from {losses[0]:.3f} to "
            f"{losses[-1]:.3f}; it must fall below 0.7 of the first: compare y, dx and dw with y, dx and dw in fp32"
        )


def test_hybrid_tensors_are_tensors(family: Family, partner: str) -> None:
    """A hybrid is cut, joined and written to like any other."""
    both = hybrid(family.default, lpq.quantizer(partner))
    rows, cols = cut(both)
    tensor = both.quantize(normal(2 * rows, cols), seed=SEED)
    joined = torch.cat([tensor[:rows], tensor[rows:]])
    if not any(side.stochastic for side in sides(both)):
        if not no_parts(both, 0):
            same_quantized(joined, tensor, f"{both}: cut and joined")
        values = normal(2 * rows, cols, seed=1)
        same_quantized(tensor.copy_(values), both.quantize(values), f"{both}: copy_")
