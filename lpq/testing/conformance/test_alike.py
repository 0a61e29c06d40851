"""Quantizers that a format declares to store, or to decode, as another one does: the declared one's kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.operations.format_calls import encoded_by
from lpq.testing.expect import equal, same, there
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


def _values(side: Quantizer) -> Tensor:
    """Rows of many sizes, in whole groups of the rotation."""
    cols = 80 if side.basis is None else 5 * side.basis.block
    return normal(33, cols) * torch.logspace(-6, 2, 33)[:, None]
