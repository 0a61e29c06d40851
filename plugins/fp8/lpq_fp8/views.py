"""Views of an encoded FP8 operand by CUDA kernels: its transpose, and the matrix that it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core import Storage
from lpq.kernels.tiles import LOW, OUTPUTS, covering, is_whole, tile_kernels, tiles, transpose_bytes
from lpq.operations.decoding import decode_reference
from lpq.operations.transposing import transpose_reference
from lpq_fp8.storage import FP8Storage

DECODE = tile_kernels("fp8/decode.cu", "decode_tiles", "PPPIIqq")[LOW]


def transpose(operand: FP8Storage) -> Storage:
    """The operand of the transposed matrix."""
    rows, cols = operand.shape
    if not rows or not cols:
        return transpose_reference(operand).map(torch.clone)
    data, scale = transpose_bytes(operand.data, operand.scale)
    return FP8Storage(data=data, scale=scale).bind(operand.quantizer, (cols, rows), operand.dtype)


def decode(operand: FP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    (rows, cols), quantizer = operand.shape, operand.quantizer
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = operand.data.contiguous(), operand.scale
    out = data.new_empty((rows, cols), dtype=dtype)
    high, wide = quantizer.scaled_block
    macros = f"LPQ_ELEMENT={quantizer.dtype.upper()}", OUTPUTS[dtype]
    DECODE.launch(
        data.get_device(), macros + covering(LOW, is_whole(data, rows, cols, LOW)),
        tiles(rows, cols, LOW), data.data_ptr(), scale.data_ptr(), out.data_ptr(), high or 0, wide or 0,
        *(scale.stride() or (0, 0)), rows, cols,
    )  # fmt: skip
    return out
