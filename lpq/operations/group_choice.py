"""How rows in groups are multiplied: as they are encoded, or as what they decode to in bf16; whichever takes less time.

Both are products of the same numbers, summed exactly unless a recipe allows less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lpq.formats.format import Direction, Quantizer
from lpq.formats.groups import unit
from lpq.kernels import choose
from lpq.kernels.table import kernels_allowed
from lpq.operations.fused_pair import ALIGNED
from lpq.operations.sectioned import decodable

EXACT_FROM = 1024
"""From so many rows of a group on, on average, a product of codes with exact sums takes less than one in bf16."""


def kernel_of(
    a: Quantizer, b: Quantizer, rows: int, groups: int, fast_accumulate: bool, device: torch.device
) -> Callable[..., Any] | None:
    """What multiplies the codes of such operands; None where what they decode to is multiplied in bf16."""
    if a.plain or b.plain or rows == 0 or (not fast_accumulate and rows < EXACT_FROM * groups):
        return None
    return choose("grouped_gemm", (a.text, b.text), device).impl


class OfProduct(NamedTuple):
    """One operand of a product of groups."""

    side: Quantizer
    direction: Direction
    stack: bool = False
    """Whether it is a stack, and not of rows in groups."""


def decoded_at_once(
    a: OfProduct, b: OfProduct, rows: int, weight: Sequence[int], fast_accumulate: bool, device: torch.device
) -> bool:
    """Whether the operands of a product of so many rows need not be encoded: only what they decode to is made, in the
    basis in which they are stored. ``weight`` is the shape of the stack of weights."""
    groups, outputs, features = weight
    if device.type != "cuda" or 0 in (rows, groups) or outputs % ALIGNED or features % ALIGNED:
        return False
    if a.side.rotation != b.side.rotation or (a.side.plain and b.side.plain):
        return False
    columns, allowed = not b.stack, kernels_allowed()  # groups of columns must begin at the same places
    if columns and (a.side.plain or b.side.plain or unit(a.side, 1) != unit(b.side, 1)):
        return False
    for side, direction, stack in (a, b):
        if not side.plain and not decodable(side.text, direction, device, stack, allowed):
            return False
    return kernel_of(a.side, b.side, rows, groups, fast_accumulate, device) is None
