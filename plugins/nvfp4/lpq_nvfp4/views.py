"""Views of encoded NVFP4 operands: a transpose, and the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.tiles import (
    BROAD,
    LOW,
    OUTPUTS,
    UNIT,
    Shape,
    covering,
    divides,
    is_whole,
    tile_kernels,
    tiles,
)
from lpq.kernels.transposes import Size, bind_several, tiled, transpose_kernels, wide
from lpq.operations.binding import ALIGNED, Operand, Transpose, Transposes, cached_transpose
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import Exact
from lpq_nvfp4.storage import NVFP4Storage

DECODE = tile_kernels("nvfp4/decode.cu", "decode_tiles", "PPPPqq")[LOW]


SEVERAL = 13
"""Matrices of one launch."""
TRANSPOSE = transpose_kernels("nvfp4/transpose.cu", "transpose_nibbles", "PPPPPPqq")
TRANSPOSE_SEVERAL = transpose_kernels("nvfp4/transpose.cu", "transpose_several_of_nibbles", f"({SEVERAL * 'PPPPPPq'})I")


def bind_transpose(operand: Operand, device: torch.device) -> Transpose:
    """Choose the tiles of a transpose."""
    rows, cols = operand.shape
    shape, blocks = _tiled([operand])
    launch = TRANSPOSE[shape.tall // 2].bind(device.index or 0, wide(shape.tall // 2), blocks)

    def turn(buffers: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        launch(*(t.data_ptr() for pair in zip(buffers, out, strict=True) for t in pair), rows, cols)

    return turn


def bind_transposes(operands: Sequence[Operand], device: torch.device) -> Transposes:
    """As ``bind_transpose``, for several operands of one quantizer."""
    shape, _ = _tiled(operands)
    return bind_several(TRANSPOSE_SEVERAL[shape.tall // 2], shape, _sizes(operands), SEVERAL, 3, (), device)


def _sizes(operands: Sequence[Operand]) -> list[Size]:
    return [(operand.shape[0], operand.shape[1]) for operand in operands]


def _tiled(operands: Sequence[Operand]) -> tuple[Shape, int]:
    return tiled(_sizes(operands), Shape(2 * BROAD, 256), Shape(2 * UNIT, 256))


transpose = cached_transpose(bind_transpose)


def decode(operand: NVFP4Storage, dtype: torch.dtype, *, unit: bool = False) -> Tensor:
    """The matrix that the operand stands for. ``unit``: what is stored, rotated if it is, without its amax: elements
    times block scales times 2^-11, which bf16 holds exactly."""
    rows, cols = operand.shape
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale, amax = operand.data.contiguous(), operand.scale, operand.amax.contiguous()
    out = data.new_empty((rows, cols), dtype=dtype)
    side = operand.quantizer
    macros = _macros(side.block, side.rht and not unit, side.scaling == "row" and not unit, dtype) + covering(
        LOW, is_whole(data, rows, cols, LOW)
    )
    DECODE.launch(
        data.get_device(), macros, tiles(rows, cols, LOW),
        data.data_ptr(), scale.data_ptr(), 0 if unit else amax.data_ptr(), out.data_ptr(),
        *scale.stride(), rows, cols,
    )  # fmt: skip
    return out


def bind_unit(
    operand: Operand, device: torch.device, constant: float, otherwise: Callable[[Sequence[Tensor]], Exact]
) -> Callable[[Sequence[Tensor]], Exact]:
    """Bind ``decode`` with ``unit`` in bf16 to operands of one shape, whose factor is the amax times ``constant``.
    ``otherwise`` is called for buffers in another memory order than encoding leaves them in."""
    (rows, cols), empty, memory = operand.shape, allocator(device), fresh(operand.shape, torch.bfloat16)
    macros = _macros(operand.quantizer.block, False, False, torch.bfloat16) + covering(LOW, divides(rows, cols, LOW))
    launch = DECODE.bind(device.index or 0, macros, tiles(rows, cols, LOW))

    def exact(buffers: Sequence[Tensor]) -> Exact:
        data, scale, amax = buffers[:3]
        at = data.data_ptr()
        if at % ALIGNED or not data.is_contiguous():
            return otherwise(buffers)
        out = empty(*memory)
        launch(at, scale.data_ptr(), 0, out.data_ptr(), *scale.stride(), rows, cols)
        return Exact(out, amax, constant)

    return exact


@cache
def _macros(block: str, rotated: bool, by_rows: bool, dtype: torch.dtype) -> tuple[str, ...]:
    switches = {"LPQ_SQUARE": block == "16x16", "LPQ_ROTATED": rotated, "LPQ_ROWS": by_rows}
    return OUTPUTS[dtype], *(name for name, on in switches.items() if on)
