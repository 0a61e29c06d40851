"""What is made of encoded MXFP8 operands: the matrices that they stand for, and their product."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core import decode as decode_operand
from lpq.core.operations import decode_reference
from lpq.ops.cuda import CudaKernel
from lpq.ops.products import product
from lpq.ops.tiles import OUTPUTS, THREADS, tiles
from lpq_mxfp8.storage import MXFP8Storage

DECODE = CudaKernel("mxfp8/decode.cu", "decode_tiles", "PPPqq", threads=THREADS)


def decode(operand: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = operand.data.contiguous(), operand.scale.contiguous()
    out = data.new_empty((rows, cols), dtype=dtype)
    DECODE.launch(
        data.get_device(), (f"LPQ_ELEMENT={operand.quantizer.dtype.upper()}", OUTPUTS[dtype]), tiles(rows, cols),
        data.data_ptr(), scale.data_ptr(), out.data_ptr(), rows, cols,
    )  # fmt: skip
    return out


def gemm(a: MXFP8Storage, b: MXFP8Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """The product in bf16, in which an element times its scale is exact but for subnormal numbers."""
    return product(decode_operand(a, torch.bfloat16), decode_operand(b, torch.bfloat16), bias, dtype)
