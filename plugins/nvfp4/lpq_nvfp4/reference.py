"""NVFP4 in plain PyTorch: this is what defines the format.

An operand or a row has an amax, a block an E4M3 scale relative to that, an element an E2M1 value relative to both.
Every product and quotient is rounded to fp32, in the order written: another order differs in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks, with_exact_scales
from lpq.formats.elements import (
    E4M3,
    FLT_MAX,
    cast_float8,
    decode_e2m1_pairs,
    decode_float8,
    pack_nibbles,
    rounded_to_e2m1,
)
from lpq.formats.layout import Block

GROUP = 16
"""Columns are stored in whole groups of this many; a block is one group wide."""
BLOCKS: dict[str, Block] = {"1x16": (1, GROUP), "16x16": (GROUP, GROUP)}
SCALED: dict[str, Block] = {"tensor": (None, None), "row": (1, None), "delayed": (None, None)}
"""The part of an operand that one amax covers, by the values of ``scaling``."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
ROOM = 17 / 16
"""By at most this factor E4M3 rounds the scale of a block down."""
ROOMY_MAX = E2M1_MAX / ROOM
"""The element that the amax of a block becomes in place of 6, where none may be cut: at most 6, with that scale."""
Choose = Callable[[Tensor, Tensor, Tensor, Tensor, Block], Tensor]
"""``choose(x, scale, amaxes, overall, block)``."""


def measure(x: Tensor, block: Block, scaled: Block) -> tuple[Tensor, Tensor]:
    """The largest magnitude of the matrix, or of each row, and of each block."""
    amaxes = block_amax(x, block)
    return block_amax(amaxes, scaled), amaxes


def encode(
    x: Tensor,
    amax: Tensor,
    amaxes: Tensor,
    block: Block,
    cast: Callable[[Tensor], Tensor],
    choose: Choose | None = None,
    largest: float = E2M1_MAX,
) -> tuple[Tensor, Tensor]:
    """Packed elements and block scales. ``cast`` rounds fp32 to E2M1; the padding of columns is 0. ``choose`` gives
    scales in place of the scales of the amaxes. ``largest``: the element that the amax of a block becomes."""
    overall = tensor_scale(amax)
    scale = cast_float8((amaxes * (overall * (1 / largest))).clamp(max=E4M3_MAX), E4M3)
    if choose is not None:
        scale = choose(x, scale, amaxes, overall, block)
    code = cast(scale_blocks(x, factor_of(decode_float8(scale), overall), block))
    return pack_nibbles(pad_blocks(code, (1, GROUP))), scale


def with_room(amax: Tensor, times: float) -> Tensor:
    """The amax of an operand whose largest scales or elements are ``1 / times`` of what they could be."""
    return torch.where(amax < torch.inf, (amax * times).clamp(max=FLT_MAX), amax)


def factor_of(scale: Tensor, overall: Tensor) -> Tensor:
    """The factor that takes the elements of a block with this scale to E2M1's."""
    return (scale * overall.reciprocal()).reciprocal().clamp(max=FLT_MAX)


def tensor_scale(amax: Tensor) -> Tensor:
    """The factor that takes the matrix's amax to the largest element of a block with the largest scale.

    It is 1 where the amax is 0 or not finite.
    """
    scale = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=FLT_MAX)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def decode(data: Tensor, scale: Tensor, amax: Tensor, block: Block) -> Tensor:
    """``element · scale · amax · fl(1/2688)``, padding columns included; not finite unless the amax is."""
    values = scale_blocks(decode_e2m1_pairs(data), decode_float8(scale), block)
    # A large amax would overflow before the last factor. Divided by 2^12 until then, it changes no bit.
    shift = torch.where(amax > 1, torch.full_like(amax, 2.0**12), 1.0)
    return values.mul_(amax / shift).mul_(shift * (1 / (E4M3_MAX * E2M1_MAX)))


def unrounded(x: Tensor, amaxes: Tensor, block: Block, largest: float) -> Tensor:
    """The matrix if scales of blocks were not rounded."""
    return with_exact_scales(x, amaxes, block, largest, rounded_to_e2m1)
