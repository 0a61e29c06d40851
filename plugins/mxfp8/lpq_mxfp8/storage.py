"""The buffers of an MXFP8 operand, and their decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpq.core import Buffer, Storage
from lpq_mxfp8 import reference
from lpq_mxfp8.reference import BLOCK, ELEMENTS

if TYPE_CHECKING:
    from lpq_mxfp8.quantizer import MXFP8Quantizer

SCALE = Buffer("scale", torch.uint8, block=BLOCK, column_major=True, from_stats=True)
LAYOUTS = {name: (Buffer("data", dtype), SCALE) for name, dtype in ELEMENTS.items()}


class MXFP8Storage(Storage):
    """``data``: an 8-bit float for each element. ``scale``: a biased exponent (E8M0) for each block."""

    layout = LAYOUTS["e4m3"]
    quantizer: MXFP8Quantizer

    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        return LAYOUTS[quantizer.dtype]

    def decode(self) -> Tensor:
        return reference.decode(self.data, self.scale)
