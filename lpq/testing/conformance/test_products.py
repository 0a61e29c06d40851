"""Products of any two operands: steps that are left out of a product, such as undoing a rotation of both, do not change
it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from lpq import registry
from lpq.formats import Quantizer
from lpq.operations import gemm
from lpq.registry.errors import OptionError
from lpq.testing.expect import relative_error
from lpq.testing.operands import encode, normal, sides
from lpq.testing.options import Family, nearby, with_other_numbers

SHAPES = (33, 40), (17, 40)
"""Sizes of two operands. No format has blocks of 40 columns, and a rotation mixes padding into the last columns."""


def test_products_are_those_of_decoded_operands(family: Family) -> None:
    """Any two operands, of all options of this format and of the others of its plugin, give the product of their
    decoded matrices, up to the order of sums.

    A format fails whose kernels for products take two rotations for one.
    """
    operand_sides = dict.fromkeys(side for quantizer in _multiplied(family) for side in sides(quantizer))
    encodings = {
        side: [encode(side, normal(*shape, seed=seed)) for seed, shape in enumerate(SHAPES)] for side in operand_sides
    }
    decoded = {side: [operand.decode().double() for operand in operands] for side, operands in encodings.items()}
    for a, b in itertools.product(encodings, repeat=2):
        first, second = encodings[a][0], encodings[b][1]
        product = decoded[a][0] @ decoded[b][1].t()
        eps = torch.finfo(first.tensors()[0].dtype).eps if a.plain and b.plain else 0
        error, allowed = relative_error(gemm(first, second, dtype=torch.float32), product), max(4 * eps, 1e-5)
        assert error <= allowed, (
            f"the product of {a} and {b} is off by {error:.1e} of the product of the decoded operands; below "
            f"{allowed:.1e} is the order of sums: {_remedy(a, b)}"
        )


def _remedy(a: Quantizer, b: Quantizer) -> str:
    if a.basis != b.basis:
        return "undo rotations that are not equal in kernels for gemm"
    return "the values that decode_stored returns must have the product of the matrices"


def _multiplied(family: Family) -> Iterator[Quantizer]:
    """The quantizers of a format, and some of each other format of its plugin; of rotated ones, also quantizers with
    other numbers among the options."""
    own = registry.format_of(type(family.default)).name
    yield from family.quantizers
    for side in (side for quantizer in family.quantizers for side in sides(quantizer) if side.basis is not None):
        yield from with_other_numbers(side)
    for other in registry.plugin_of(own).formats:
        if other != own:
            try:
                yield from nearby(other)
            except OptionError:  # it has options without a default
                continue
