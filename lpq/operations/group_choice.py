"""The choice of how rows in groups are multiplied: by their codes, or by their decoded values in bf16, if that is
faster.

Both are products of the same numbers, summed exactly unless a recipe allows less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.formats.groups import unit
from lpq.kernels import Choice, choose
from lpq.kernels.table import kernels_allowed
from lpq.operations.fused_pair import ALIGNED
from lpq.operations.sectioned import decodable


def choice_of(a: Quantizer, b: Quantizer, rows: int, device: torch.device) -> Choice | None:
    """The kernel that multiplies codes of such operands; None where decoded values are multiplied in bf16."""
    if a.plain or b.plain or rows == 0:
        return None
    choice = choose("grouped_gemm", (a.text, b.text), device)
    return choice if choice.impl is not None else None


class OfProduct(NamedTuple):
    """One operand of a product of groups."""

    side: Quantizer
    direction: Direction
    stack: bool = False
    """Whether it is a stack, and not rows in groups."""


def decoded_at_once(a: OfProduct, b: OfProduct, rows: int, weight: Sequence[int], device: torch.device) -> bool:
    """Whether the operands of a product of so many rows need no codes: only their decoded values are made, in the basis
    in which they are stored. ``weight`` is the shape of the stack of weights."""
    groups, outputs, features = weight
    if device.type != "cuda" or 0 in (rows, groups) or outputs % ALIGNED or features % ALIGNED:
        return False
    if a.side.basis != b.side.basis or (a.side.plain and b.side.plain):
        return False
    columns, allowed = not b.stack, kernels_allowed()  # groups of columns must begin at the same places
    if columns and (a.side.plain or b.side.plain or unit(a.side, 1) != unit(b.side, 1)):
        return False
    for side, direction, stack in (a, b):
        if not side.plain and not decodable(side.text, direction, device, stack, allowed):
            return False
    return choice_of(a.side, b.side, rows, device) is None


def why_decoded(a: Quantizer, b: Quantizer) -> str | None:
    """Why groups of such operands are multiplied decoded, on every GPU; None if some GPU multiplies their codes."""
    if a.plain or b.plain:
        return "an operand is not encoded"
    formats = {registry.format_of(type(q)).name for q in (a, b)}
    reason = None
    for kernel in registry.kernels("grouped_gemm", tuple(formats)) if len(formats) == 1 else ():
        reason = registry.resolve(kernel.why_not)(a, b) if kernel.why_not is not None else None
        if reason is None:
            return None
    return reason or f"no kernel multiplies codes of {' and '.join(sorted(formats))} in groups"


SAVED = 5.6e-16
"""Seconds that a product of codes takes less than one in bf16, for each multiplication and each addition in it."""
ENCODING = 2.02e-12
"""Seconds that encoding takes for an element of x, of w or of dy. Both were measured on an H100, with 8 experts of 4096
x 14336 and 2048 rows each, by ``python -m benchmarks.group_choice``."""


def pays_from(products: int, outputs: int, features: int) -> int | None:
    """The number of rows of each expert from which on so many ``products`` of codes save more time than encoding takes;
    None if they never do."""
    saved = products * SAVED * 2 * outputs * features - ENCODING * (outputs + features)
    return math.ceil(ENCODING * outputs * features / saved) if saved > 0 else None
