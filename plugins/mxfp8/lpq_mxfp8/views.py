"""What is made of encoded MXFP8 operands: the matrices that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core.operations import decode_reference
from lpq.ops.tiles import LOW, OUTPUTS, covering, is_whole, tile_kernels, tiles
from lpq_mxfp8.storage import MXFP8Storage

DECODE = tile_kernels("mxfp8/decode.cu", "decode_tiles", "PPPqq")[LOW]


def decode(operand: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = operand.data.contiguous(), operand.scale
    out = data.new_empty((rows, cols), dtype=dtype)
    macros = f"LPQ_ELEMENT={operand.quantizer.dtype.upper()}", OUTPUTS[dtype]
    DECODE.launch(
        data.get_device(), macros + covering(LOW, is_whole(data, rows, cols, LOW)),
        tiles(rows, cols, LOW), data.data_ptr(), scale.data_ptr(), out.data_ptr(), *scale.stride(), rows, cols,
    )  # fmt: skip
    return out
