"""The buffers of an NVFP4 operand, and their decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpq.core import Buffer, Storage
from lpq.formats.blocks import pad_blocks
from lpq.formats.elements import E4M3, pack_nibbles, unpack_nibbles
from lpq_nvfp4 import reference
from lpq_nvfp4.eden import ROTATED
from lpq_nvfp4.reference import BLOCKS, GROUP, SCALED

if TYPE_CHECKING:
    from lpq_nvfp4.quantizer import NVFP4Quantizer

LAYOUTS = {
    (name, searched, scaling): (
        Buffer("data", torch.uint8, block=(1, 2), pad=GROUP),
        Buffer("scale", E4M3, block=block, column_major=name == "1x16", from_stats=not searched),
        Buffer("amax", torch.float32, block=scaled, from_stats=not searched),
    )
    for name, block in BLOCKS.items()
    for searched in (False, True)
    for scaling, scaled in SCALED.items()
}
"""Where scales are searched, the code of an element depends on all of its block, so no buffer is declared to follow
from statistics."""


EDEN = (
    Buffer("data", torch.uint8, block=(1, 2), pad=ROTATED),
    Buffer("scale", E4M3, block=BLOCKS["1x16"], pad=ROTATED),
    Buffer("amax", torch.float32, block=(None, None), from_stats=True),
    Buffer("turn", torch.int32, block=(None, None)),
)


class NVFP4Storage(Storage):
    """``data``: two E2M1 values in a byte, the even column low. ``scale``: E4M3 for each block. ``amax``: of the
    matrix, or of each row. ``turn``: the number by which the rotation was drawn, if it was.

    The columns of ``data`` are padded to whole groups of 16, or as many as a rotation mixes.
    """

    layout = LAYOUTS["1x16", False, "tensor"]
    quantizer: NVFP4Quantizer

    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        if quantizer.eden:
            return EDEN
        return LAYOUTS[quantizer.block, quantizer.searches, quantizer.scaling]

    def decode_stored(self) -> Tensor:
        return reference.decode(self.data, self.scale, self.amax, BLOCKS[self.quantizer.block])

    def transposed(self) -> NVFP4Storage:
        code = unpack_nibbles(self.data)[:, : self.shape[1]].t()
        return NVFP4Storage(data=pack_nibbles(pad_blocks(code, (1, GROUP))), scale=self.scale.t(), amax=self.amax)
