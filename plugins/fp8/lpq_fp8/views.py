"""Views of an encoded FP8 operand by CUDA kernels: its transpose, and the matrix that it stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import (
    BROAD,
    LOW,
    OUTPUTS,
    TALL,
    Shape,
    covering,
    is_whole,
    tile_kernels,
    tiles,
)
from lpq.kernels.transposes import Size, bind_several, tiled, transpose_kernels, wide
from lpq.operations.binding import Operand, Transpose, Transposes, cached_transpose
from lpq.operations.decoding import decode_reference
from lpq.operations.recoding import CodeReader
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.storage import FP8Storage

DECODE = tile_kernels("fp8/decode.cu", "decode_tiles", "PPPIIqq")[LOW]


SEVERAL = 16
"""Matrices of one launch."""
TRANSPOSE = transpose_kernels("fp8/transpose.cu", "transpose_bytes", "PPPPIqq")
TRANSPOSE_SEVERAL = transpose_kernels("fp8/transpose.cu", "transpose_several_of_bytes", f"({SEVERAL * 'PPPPq'})II")


def bind_transpose(operand: Operand, device: torch.device) -> Transpose:
    """Choose the tiles of a transpose, and of the transpose of the scales: one scale, or one for each 128x128."""
    rows, cols = operand.shape
    shape, blocks = _tiled([operand])
    launch = TRANSPOSE[shape.wide].bind(device.index or 0, wide(shape.wide), blocks)
    scales = _scales(operand)

    def turn(buffers: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        (data, scale), (transposed, its_scale) = buffers, out
        launch(data.data_ptr(), transposed.data_ptr(), scale.data_ptr(), its_scale.data_ptr(), scales, rows, cols)

    return turn


def bind_transposes(operands: Sequence[Operand], device: torch.device) -> Transposes:
    """As ``bind_transpose``, for several operands of one quantizer."""
    shape, _ = _tiled(operands)
    rest = (_scales(operands[0]),)
    return bind_several(TRANSPOSE_SEVERAL[shape.wide], shape, _sizes(operands), SEVERAL, 2, rest, device)


def _scales(operand: Operand) -> int:
    """The number by which the kernel knows whether there are several scales."""
    return 2 if operand.quantizer.scaling == "block" else 1


def _sizes(operands: Sequence[Operand]) -> list[Size]:
    return [(operand.shape[0], operand.shape[1]) for operand in operands]


def _tiled(operands: Sequence[Operand]) -> tuple[Shape, int]:
    return tiled(_sizes(operands), Shape(256, BROAD), TALL)


transpose = cached_transpose(bind_transpose)


def reader(quantizer: FP8Quantizer) -> CodeReader:
    """How the codes of an operand are read."""
    high, wide = quantizer.scaled_block

    def fields(buffers: Sequence[Tensor]) -> Sequence[float]:
        data, scale = buffers
        return data.data_ptr(), scale.data_ptr(), high or 0, wide or 0, *(scale.stride() or (0, 0))

    return CodeReader(csrc() / "fp8/codes.cuh", f"fp8::Codes<{quantizer.dtype.upper()}>", "PPqqqq", fields)


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
