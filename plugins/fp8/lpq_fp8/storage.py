"""The buffers of an FP8 operand, and their decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpq.core import Buffer, Storage
from lpq_fp8 import reference
from lpq_fp8.reference import BLOCKS, ELEMENTS, ROW, TENSOR

if TYPE_CHECKING:
    from lpq_fp8.quantizer import FP8Quantizer

LAYOUTS = {
    (name, block): (
        Buffer("data", element),
        Buffer("scale", torch.float32, block=block, column_major=block == BLOCKS["1x128"], from_stats=True),
    )
    for name, element in ELEMENTS.items()
    for block in (TENSOR, ROW, *BLOCKS.values())
}


class FP8Storage(Storage):
    """``data``: an 8-bit float for each element. ``scale``: what decodes the elements of each block."""

    layout = LAYOUTS["e4m3", TENSOR]
    quantizer: FP8Quantizer

    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        return LAYOUTS[quantizer.dtype, quantizer.scaled_block]

    def decode(self) -> Tensor:
        return reference.decode(self.data, self.scale, self.quantizer.scaled_block)

    def transposed(self) -> FP8Storage:
        return FP8Storage(data=self.data.t(), scale=self.scale.t())
