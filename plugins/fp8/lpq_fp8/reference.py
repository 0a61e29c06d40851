"""FP8 in plain PyTorch: this is what defines the format.

A block, which may be a row or the whole matrix, has an fp32 scale that takes its amax to the largest value of
the element type, and holds ``x · scale`` as 8-bit floats. Stored is ``1 / scale``: multiply to decode.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lpq.formats.blocks import block_amax, expand_blocks, scale_blocks
from lpq.formats.elements import E4M3, E5M2, decode_float8, scale_float8
from lpq.formats.layout import Block

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
TENSOR: Block = (None, None)
ROW: Block = (1, None)
BLOCKS: dict[str, Block] = {"1x128": (1, 128), "128x128": (128, 128)}


def measure(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block."""
    return block_amax(x, block)


def encode(
    x: Tensor, amax: Tensor, block: Block, element: torch.dtype, *, largest_scale: float, pow2: bool
) -> tuple[Tensor, Tensor]:
    """Elements and decode scales. Where the amax is an earlier tensor's, a larger element saturates."""
    scale = scale_from_amax(amax, torch.finfo(element).max, largest_scale, pow2)
    return scale_float8(x.float(), expand_blocks(scale, block, *x.shape), element), scale.reciprocal()


def scale_from_amax(amax: Tensor, largest: float, largest_scale: float, pow2: bool) -> Tensor:
    """The factor that takes each amax to ``largest``; 1 where the amax is 0 or not finite.

    Where it would be infinite it is ``largest_scale``. With ``pow2`` it is rounded down to a power of two.
    """
    scale = torch.full_like(amax, largest) / amax  # a Python number over a tensor would be rounded twice
    scale = torch.where(scale == torch.inf, largest_scale, scale)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def decode(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """The matrix in fp32."""
    return scale_blocks(decode_float8(data), scale, block)


def pushed(history: Tensor, amax: Tensor) -> Tensor:
    """The history after a step with this amax. The newest entry comes first, and the oldest is lost."""
    return torch.cat((amax.reshape(1), history[:-1]))


def next_amax(history: Tensor, amax: Tensor, margin: int, algo: Literal["max", "most_recent"]) -> Tensor:
    """The amax that scales the next step: from the history, or still ``amax`` if that is 0 or not finite."""
    recent = (history.amax() if algo == "max" else history[0]) * 2.0**margin
    return torch.where((recent > 0) & (recent < torch.inf), recent, amax)
