"""MS-EDEN's Triton kernels: one operand from one read, after one more for the amax of the matrix; and the way back."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.kernels.triton import block_amaxes, launch, programs
from lpq.kernels.triton.numbers import (
    FLT_MAX,
    INF,
    cast_e2m1,
    decode_e2m1,
    decode_float8,
    pack_nibbles,
    size_of,
    unpack_nibbles,
    value_of,
    widen,
)
from lpq.kernels.triton.rotation import hadamard
from lpq.kernels.triton.tiles import block_amax, load_tile, place_of_tile, spread, store_tile, store_values
from lpq.operations.decoding import decode_reference
from lpq.operations.inputs import DTYPES
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference
from lpq_nvfp4 import eden
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP
from lpq_nvfp4.storage import NVFP4Storage
from lpq_nvfp4.triton import scale_code, scale_of, summed

WIDTH, ROTATED = tl.constexpr(GROUP), tl.constexpr(eden.ROTATED)
LINES = 16
"""Lines of an operand that a program takes, of one group each."""
ROOM, INVERSE = tl.constexpr(eden.ROOM), tl.constexpr(1 / eden.LARGEST)
ROOT = tl.constexpr(eden.ROTATED**-0.5)
ONE, LARGEST_CODE = tl.constexpr(eden.ONE_CODE), tl.constexpr(eden.LARGEST_CODE)


@triton.jit
def _signs(key):
    """The sign of each column of a group, by the lower half of the seed."""
    column = tl.arange(0, ROTATED)[None, :]
    zero = tl.zeros((1, ROTATED), tl.int32)
    a, b, c, d = tl.philox(key << 32, zero, zero, zero + 2, zero)
    word = tl.where(column < 64, tl.where(column < 32, a, b), tl.where(column < 96, c, d))
    minus = (word >> (column % 32).to(tl.uint32)) & 1
    return 1.0 - 2.0 * minus.to(tl.float32)


@triton.jit
def _of_group(x):
    """The sum of eight values: halves, quarters, eighths."""
    high: tl.constexpr = x.shape[0]
    a, b = tl.split(tl.permute(tl.reshape(x, (high, 2, 4)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (high, 2, 2)), (0, 2, 1)))
    a, b = tl.split(a + b)
    return tl.reshape(a + b, (high, 1))


@triton.jit
def _rounded(scale, number):
    """E4M3's number below each scale, or the next one, by 24 random bits."""
    near = scale_code(scale).to(tl.int32)
    below = tl.where(decode_float8(near, False) > scale, near - 1, near)
    above = tl.minimum(below + 1, LARGEST_CODE)
    lower, upper = decode_float8(below, False), decode_float8(above, False)
    chance = number.to(tl.float32) * 5.9604644775390625e-08
    up = (upper > lower) & (chance * (upper - lower) < scale - lower)
    return tl.where(up, below + 1, below).to(tl.uint8)


# Statistics may be views of what ranks reduced: one program for them wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["amax"])
def _encode(
    x, data, scale, amax_out, turn, amax, seed, of_line, of_block, lines, cols, rows_of_x, cols_of_x,
    COL: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    line, col = place_of_tile(cols, HIGH, ROTATED)
    if COL:
        values = widen(tl.trans(load_tile(x, col, line, rows_of_x, cols_of_x, ROTATED, HIGH)))
    else:
        values = widen(load_tile(x, line, col, rows_of_x, cols_of_x, HIGH, ROTATED))
    key = tl.load(seed)
    found = tl.load(amax + tl.zeros((1, 1), tl.int32))
    roomy = found * ROOM
    largest = tl.where(size_of(found) < INF, tl.where(roomy > FLT_MAX, FLT_MAX, roomy), found)
    first = tl.zeros((1, 1), tl.int32)
    tl.store(amax_out + first, largest, mask=line + col + first == 0)
    tl.store(turn + first, (key + first).to(tl.int32), mask=line + col + first == 0)
    overall = tl.div_rn(tl.full((1, 1), 2688.0, tl.float32), largest)
    overall = tl.where(overall > FLT_MAX, FLT_MAX, overall)
    overall = tl.where((largest > 0) & (size_of(largest) < INF), overall, 1.0)
    y = hadamard(values * (_signs(key) * ROOT), 7)
    code = scale_code(value_of(block_amax(y, HIGH, ROTATED // WIDTH)) * (overall * INVERSE)).to(tl.int32)
    value, factor = scale_of(tl.where(code == 0, ONE, code), overall)
    z = y * spread(factor, HIGH, ROTATED)
    codes = cast_e2m1(z)
    over, under = _of_group(summed(z * z, 1)), _of_group(summed(z * decode_e2m1(codes), 1))
    correction = tl.where(under == 0, 1.0, tl.div_rn(over, under))
    group = col // WIDTH + tl.arange(0, ROTATED // WIDTH)[None, :]
    place = line + tl.arange(0, HIGH)[:, None]
    zero = tl.zeros((HIGH, ROTATED // WIDTH), tl.int32)
    c0, c1 = zero + (group + of_block).to(tl.int32), zero + (place + of_line).to(tl.int32)
    word, _, _, _ = tl.philox(key, c0, c1, zero + (1 if COL else 0), zero)
    blocks = ((cols - 1) // ROTATED + 1) * (ROTATED // WIDTH)
    made = _rounded(value * correction, word & 0xFFFFFF)
    tl.store(scale + place * blocks + group, made, mask=(place < lines) & (group < blocks))
    store_tile(data, pack_nibbles(codes), line, col // 2, lines, blocks * (WIDTH // 2))


@triton.jit
def _decode(data, scale, amax, turn, out, rows, cols, HIGH: tl.constexpr):
    line, col = place_of_tile(cols, HIGH, ROTATED)
    blocks = ((cols - 1) // ROTATED + 1) * (ROTATED // WIDTH)
    codes = unpack_nibbles(load_tile(data, line, col // 2, rows, blocks * (WIDTH // 2), HIGH, ROTATED // 2))
    group, place = col // WIDTH + tl.arange(0, ROTATED // WIDTH)[None, :], line + tl.arange(0, HIGH)[:, None]
    scales = decode_float8(tl.load(scale + place * blocks + group, mask=place < rows, other=0), False)
    values = decode_e2m1(codes) * spread(scales, HIGH, ROTATED)
    largest = tl.load(amax + tl.zeros((1, 1), tl.int32))
    shifted = largest > 1  # a large amax would overflow before the last factor
    values = values * tl.where(shifted, largest * 0.000244140625, largest)
    values = values * tl.where(shifted, 4096.0 * (1.0 / 2688.0), 1.0 / 2688.0)
    store_values(out, hadamard(values * ROOT, 7) * _signs(tl.load(turn).to(tl.int64)), line, col, rows, cols)


def measure(x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None) -> list[Tensor]:
    """The amax of the matrix."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    return block_amaxes(x.contiguous(), (None, None), None)


def quantize(
    x: Tensor, stats: Sequence[Tensor | None], row: NVFP4Quantizer | None, col: NVFP4Quantizer | None,
    seed: Tensor | None, offset: int, measure: bool,
) -> list[Tensor]:  # fmt: skip
    """Encode as the reference does. The reference itself is called for an empty matrix, and where the first row of a
    shard cuts a group of rows that are rotated together in the column operand, which happens in no layer."""
    side = row or col
    assert side is not None
    if x.numel() == 0 or seed is None or (col is not None and offset % eden.ROTATED):
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    rows, cols = x.shape
    known = stats[0] if stats else None
    measured = block_amaxes(x, (None, None), None) if measure or known is None else []
    shape = (rows, cols) if row is not None else (cols, rows)
    operand, lines = NVFP4Storage.fresh(side, shape, x), (offset, 0) if row is not None else (0, offset // GROUP)
    launch(
        _encode, programs(shape, LINES, eden.ROTATED), x, operand.data, operand.scale.view(torch.uint8), operand.amax,
        operand.turn, measured[0] if known is None else known, seed, *lines, *shape, rows, cols, COL=row is None,
        HIGH=LINES, num_warps=4,
    )  # fmt: skip
    return [*operand.tensors(), *(measured if measure else [])]


def decode(operand: NVFP4Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in DTYPES or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale, amax, turn = (buffer.contiguous() for buffer in operand.tensors())
    out, count = data.new_empty((rows, cols), dtype=dtype), programs((rows, cols), LINES, eden.ROTATED)
    scale = scale.view(torch.uint8)
    launch(_decode, count, data, scale, amax, turn, out, rows, cols, HIGH=LINES, num_warps=4)
    return out
