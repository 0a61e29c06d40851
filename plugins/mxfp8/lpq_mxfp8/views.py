"""Views of encoded MXFP8 operands: the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.emulation.bf16_gemm import decoded
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import LOW, OUTPUTS, covering, divides, is_whole, tile_kernels, tiles
from lpq.operations.binding import ALIGNED, Operand
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import BoundExact, Exact, Form
from lpq.operations.recoding import CodeReader
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.storage import MXFP8Storage

DECODE = tile_kernels("mxfp8/decode.cu", "decode_tiles", "PPPqq")[LOW]


def decode(operand: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = operand.data.contiguous(), operand.scale
    out = data.new_empty((rows, cols), dtype=dtype)
    DECODE.launch(
        data.get_device(), _macros(operand.quantizer.dtype, dtype) + covering(LOW, is_whole(data, rows, cols, LOW)),
        tiles(rows, cols, LOW), data.data_ptr(), scale.data_ptr(), out.data_ptr(), *scale.stride(), rows, cols,
    )  # fmt: skip
    return out


def bind_exact(operand: Operand, device: torch.device) -> BoundExact:
    """``lpq.emulation.bf16_gemm.decoded`` for operands of one shape."""
    (rows, cols), empty, memory = operand.shape, allocator(device), fresh(operand.shape, torch.bfloat16)
    macros = _macros(operand.quantizer.dtype, torch.bfloat16) + covering(LOW, divides(rows, cols, LOW))
    launch = DECODE.bind(device.index or 0, macros, tiles(rows, cols, LOW))

    def exact(buffers: Sequence[Tensor]) -> Exact:
        data, scale = buffers
        at = data.data_ptr()
        if at % ALIGNED or not data.is_contiguous():
            found = decoded(operand.storage(buffers))
            assert found is not None
            return found
        out = empty(*memory)
        launch(at, scale.data_ptr(), out.data_ptr(), *scale.stride(), rows, cols)
        return Exact(out)

    return BoundExact(Form(), exact)


def reader(quantizer: MXFP8Quantizer) -> CodeReader:
    """How the codes of an operand are read."""

    def fields(buffers: Sequence[Tensor]) -> Sequence[float]:
        data, scale = buffers
        return data.data_ptr(), scale.data_ptr(), *scale.stride()

    return CodeReader(csrc() / "mxfp8/codes.cuh", f"mxfp8::Codes<{quantizer.dtype.upper()}>", "PPqq", fields)


@cache
def _macros(element: str, dtype: torch.dtype) -> tuple[str, ...]:
    return f"LPQ_ELEMENT={element.upper()}", OUTPUTS[dtype]
