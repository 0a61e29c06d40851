"""Views of an encoded FP8 operand by CUDA kernels: its transpose, and the matrix that it stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.kernels.tiles import (
    LOW,
    OUTPUTS,
    bind_transpose_bytes,
    bind_transposes_of_bytes,
    covering,
    is_whole,
    tile_kernels,
    tiles,
)
from lpq.operations.binding import Operand, Transpose, Transposes, unbound_transpose
from lpq.operations.decoding import decode_reference
from lpq_fp8.storage import FP8Storage

DECODE = tile_kernels("fp8/decode.cu", "decode_tiles", "PPPIIqq")[LOW]


def bind_transpose(operand: Operand, device: torch.device) -> Transpose:
    """Choose the tiles of a transpose."""
    rows, cols = operand.shape
    launch = bind_transpose_bytes(rows, cols, operand.quantizer.scaling == "block", device)

    def turn(buffers: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        (data, scale), (turned, its_scale) = buffers, out
        launch(data.data_ptr(), turned.data_ptr(), scale.data_ptr(), its_scale.data_ptr())

    return turn


def bind_transposes(operands: Sequence[Operand], device: torch.device) -> Transposes:
    """The same for several operands of one quantizer."""
    scales = operands[0].quantizer.scaling == "block"
    return bind_transposes_of_bytes([(operand.shape[0], operand.shape[1]) for operand in operands], scales, device)


transpose = unbound_transpose(bind_transpose)


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
