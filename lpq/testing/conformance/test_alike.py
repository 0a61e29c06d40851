"""Quantizers that a format declares to store, or to decode, as another one does: the declared one's kernels run. And
what a format tells of the error that its rounded scales make."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.operations.format_calls import encoded_by
from lpq.testing.conformance.test_purity import untouched
from lpq.testing.expect import equal, relative_error, same, there
from lpq.testing.operands import encode, measure, normal
from lpq.testing.options import only


@only(lambda side: side.without_random_bits is not None, "has `without_random_bits`")
def test_a_quantizer_without_random_bits_stores_what_encode_returns(side: Quantizer) -> None:
    """By the same statistics it makes the same bytes, of values of many sizes."""
    alike, x = there(side.without_random_bits, "`without_random_bits`"), _values(side)
    equal(bool(alike.stochastic), False, f"`stochastic` of {alike}, which is {side} without random bits")
    for name in ("stats", "basis", "layout"):
        equal(getattr(alike, name), getattr(side, name), f"`{name}` of {alike}, which is {side} without random bits")
    stats = measure(side, x)
    made, expected = (encoded_by(one, x, stats, None).buffers() for one in (alike, side))
    for name, tensor in made.items():
        same(tensor, expected[name], f"buffer {name!r} of {alike}, beside `encode` of {side}")


@only(lambda side: side.without_rotation is not None, "has `without_rotation`")
def test_a_quantizer_without_rotation_decodes_what_is_stored(side: Quantizer) -> None:
    """Over the buffers of a rotated operand it decodes to the values that are stored."""
    alike, operand = there(side.without_rotation, "`without_rotation`"), encode(side, _values(side))
    equal(alike.basis, None, f"the rotation of {alike}, which is {side} without a rotation")
    equal(alike.layout, side.layout, f"the layout of {alike}, which is {side} without a rotation")
    decoded = operand.from_tensors(operand.tensors(), alike, operand.shape, operand.dtype).decode()
    same(decoded, operand.decode_stored()[:, : operand.shape[1]], f"{alike} over the buffers of {side}")


@only(
    lambda side: type(side).unrounded is not Quantizer.unrounded or not side.rounds_scales,
    "says what rounding its scales costs",
)
def test_what_rounded_scales_cost_is_told_right(side: Quantizer) -> None:
    """``unrounded`` returns a matrix in fp32 that has no larger an error than the stored one, but for a quarter, and
    writes to nothing. Where a format says that it rounds no scale, a matrix times a factor has the same codes."""
    x, factor = normal(32, 256), 1.375
    own, stats = side.rotated(x), measure(side, x)
    operand = encode(side, x, stats)
    stored = operand.decode() if side.rotation is None else operand.decode_stored()
    error = relative_error(stored, own)
    exact = untouched({"its input": own} | stats, partial(side.unrounded, own, stats), f"{side}: unrounded")
    if exact is not None:
        equal((exact.dtype, exact.shape), (torch.float32, stored.shape), f"{side}: unrounded")
        rest = relative_error(exact, own)
        assert rest <= 1.25 * error, (
            f"{side}: what unrounded returns has the relative error {rest:.4f}, and with rounded scales it is "
            f"{error:.4f}; return the values that encode would store, rounded to its elements under exact scales"
        )
    moved = relative_error(encode(side, x * factor).decode() / factor, operand.decode())
    assert side.rounds_scales or moved <= 0.1 * error, (
        f"{side}: with rounds_scales = False, {factor} times a matrix decodes to another one times {factor}, by "
        f"{moved:.4f}, where the error is {error:.4f}: its scales are rounded; take rounds_scales away"
    )


def _values(side: Quantizer) -> Tensor:
    """Rows of many sizes, in whole groups of the rotation."""
    cols = 80 if side.basis is None else 5 * side.basis.block
    return normal(33, cols) * torch.logspace(-6, 2, 33)[:, None]
