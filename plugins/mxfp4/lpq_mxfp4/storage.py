"""The buffers of an MXFP4 operand, and their decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq.core import Buffer, Storage
from lpq_mxfp4 import reference
from lpq_mxfp4.reference import BLOCK, GROUP

if TYPE_CHECKING:
    from lpq_mxfp4.quantizer import MXFP4Quantizer


class MXFP4Storage(Storage):
    """``data``: two E2M1 values in a byte, the even column low. ``scale``: the exponent of each block.

    The columns of ``data`` are padded to whole blocks.
    """

    layout = (
        Buffer("data", torch.uint8, block=(1, 2), pad=GROUP),
        Buffer("scale", torch.uint8, block=BLOCK, column_major=True, from_stats=True),
    )
    quantizer: MXFP4Quantizer

    def decode_stored(self) -> Tensor:
        return reference.decode(self.data, self.scale)
