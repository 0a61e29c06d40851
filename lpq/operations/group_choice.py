"""The choice of how rows in groups are multiplied: by their codes, or by their decoded values in bf16, if that is
faster.

Both are products of the same numbers, summed exactly unless a recipe allows less.
"""

from __future__ import annotations

import math

import torch

from lpq import registry
from lpq.formats.format import DIRECTIONS, Quantizer
from lpq.formats.sections import unit
from lpq.kernels import Choice, choose
from lpq.operations.binding import Operand
from lpq.operations.fused_pair import ALIGNED
from lpq.operations.sectioned import decodable


def choice_of(a: Quantizer, b: Quantizer, rows: int, device: torch.device) -> Choice | None:
    """The kernel that multiplies codes of such operands; None where decoded values are multiplied in bf16."""
    if a.plain or b.plain or rows == 0:
        return None
    choice = choose("grouped_gemm", (a.text, b.text), device)
    return choice if choice.impl is not None else None


def decoded_at_once(a: Operand, b: Operand, device: torch.device) -> bool:
    """Whether the operands of a product of groups need no codes: only their decoded values are made, in the basis in
    which they are stored."""
    assert a.sections is not None
    assert b.sections is not None
    sizes, first, second = b.shape[1:] if b.sections.stack else (a.shape[0], b.shape[0]), a.quantizer, b.quantizer
    rows = a.shape[a.dim]
    if device.type != "cuda" or 0 in (rows, a.sections.number) or any(size % ALIGNED for size in sizes):
        return False
    if first.basis != second.basis or (first.plain and second.plain):
        return False
    if a.dim and (first.plain or second.plain or unit(first, 1) != unit(second, 1)):
        return False  # groups of columns must begin at the same places
    if a.dim == 0 and not (first.whole(a.shape[1]) and second.whole(a.shape[1])):
        return False
    for operand, sections in ((a, a.sections), (b, b.sections)):
        side, direction = operand.quantizer, DIRECTIONS[operand.dim]
        if not side.plain and not decodable(side.text, direction, device, sections.stack):
            return False
    return choice_of(first, second, rows, device) is None


def why_decoded(a: Quantizer, b: Quantizer) -> str | None:
    """Why groups of such operands are decoded and multiplied in bf16 on every GPU; None if some GPU multiplies their
    codes."""
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
    """Rows per expert from which on ``products`` products of codes save more time than encoding takes; None if they
    never do."""
    saved = products * SAVED * 2 * outputs * features - ENCODING * (outputs + features)
    return math.ceil(ENCODING * outputs * features / saved) if saved > 0 else None
