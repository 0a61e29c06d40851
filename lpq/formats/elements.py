"""Element types: exact casts between fp32 and the 8-bit and 4-bit floats that formats are made of.

Every function is plain PyTorch. A cast rounds to nearest even, saturates finite values and, where the element
type has a NaN, makes no non-finite value finite; a NaN has one code, whatever its sign and payload were. (To
``Tensor.to(float8_e4m3fn)`` 465 is NaN in torch 2.11, and infinity is 448 in 2.13.) Casts are arithmetic and
tables rather than masks, because on a CPU a comparison costs several times a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FLT_MAX = torch.finfo(torch.float32).max

# ---------------------------------------------------------------------------------------------- 8-bit floats


def cast_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as an 8-bit float, saturating. NaN is 0x7f; an infinity is an infinity, or NaN in E4M3.

    Args:
        x: Numbers in fp32, of any shape.
        dtype: ``E4M3`` or ``E5M2``.
    """
    return _saturate(x, x, dtype)


def scale_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` as an 8-bit float. A product too large for fp32 saturates, as any other.

    Args:
        x: Numbers in fp32. Those that are not finite decide what the result is, as in ``cast_float8``.
        scale: Factors in fp32, not negative, of a shape that broadcasts.
        dtype: ``E4M3`` or ``E5M2``.
    """
    return _saturate(x * scale, x, dtype)


def _saturate(product: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    # This vanishes beside the product where x is finite. Elsewhere it is NaN or, for E5M2, x itself.
    trace = x * 0 if dtype == E4M3 else x * 2**-100 * 2**-100
    code = trace.add_(product.clamp(-limit, limit)).to(dtype).view(torch.uint8)
    # A NaN may have come out as 0xff. Only that code wraps to 0, and so loses 128 for good.
    return (code + 1).clamp_(max=1).mul_(128).add_(code).add_(128).view(dtype)


def decode_float8(x: Tensor) -> Tensor:
    """8-bit floats ``x`` in fp32: ``x.float()``, by a table."""
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).float()
    return _look_up(table, x.view(torch.uint8))


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    return table.index_select(0, code.reshape(-1).int()).view(code.shape)


# ---------------------------------------------------------------------------------------------- E2M1


def cast_e2m1(x: Tensor) -> Tensor:
    """``x`` (fp32) as E2M1 codes, one in each byte: sign bit 3, magnitude bits 0-2. NaN is 7, that is 6.0."""
    x = _number(x)
    return _signed(_e2m1_code(x.abs(), Tensor.round_), x)


def cast_e2m1_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Cast as ``cast_e2m1`` does, but round to either neighbour, by random bits.

    ``|x| + r / 256 · step``, with the grid's step at ``|x|``, is rounded down to the grid. The product is
    exact, so that the sum is rounded once, as a fused multiply-add would.

    Args:
        x: Numbers in fp32.
        bits: One byte r for each element, as ``RandomBits.bytes`` draws them.
    """
    x = _number(x.contiguous())  # as the bits are
    magnitude = x.abs()
    step = (magnitude.clamp(1, 4).view(torch.int32) & 0x7F800000).view(torch.float32).mul_(1 / 2)
    return _signed(_e2m1_code(magnitude.add_(step.mul_(bits.float().mul_(1 / 256))), Tensor.floor_), x)


def _number(x: Tensor) -> Tensor:
    """A copy of ``x`` in which a NaN is a large positive number."""
    return torch.nan_to_num(x, nan=FLT_MAX)


def _e2m1_code(magnitude: Tensor, round_: Callable[[Tensor], Tensor]) -> Tensor:
    """The codes of non-negative numbers; ``round_`` rounds to integers in place, to the nearest even or down.

    The values 0 .5 1 1.5 2 3 4 6 make up three uniform grids, of steps 1/2, 1 and 2. Counted in steps, a value's code
    is n, n + 2 or n + 4. The least of the three codes is right everywhere. An even n is an even code.
    """
    code = round_(magnitude * 2)
    other = round_(magnitude.clone()).add_(2)
    torch.minimum(code, other, out=code)
    torch.mul(magnitude, 0.5, out=other)
    torch.minimum(code, round_(other).add_(4), out=code)
    return code.clamp_(max=7).int()


def _signed(code: Tensor, x: Tensor) -> Tensor:
    return code.bitwise_or_((x.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)


def decode_e2m1(code: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes ``code``, one in each byte."""
    # The bits of E2M1 are the top bits of an fp16 whose exponent is 14 too low, subnormals included.
    bits = code.short()
    return (((bits & 7) << 9) | ((bits & 8) << 12)).view(torch.float16).float().mul_(2.0**14)


def rounded_to_e2m1(x: Tensor) -> Tensor:
    """``decode_e2m1(cast_e2m1(x))`` of numbers ``x``, none of them NaN, in fewer passes."""
    step = (x.view(torch.int32) & 0x7F800000).clamp_(0x3F800000, 0x40800000).view(torch.float32).mul_(1 / 2)
    return x.clamp(-6, 6).div_(step).round_().mul_(step)


def decode_e2m1_pairs(packed: Tensor) -> Tensor:
    """``decode_e2m1(unpack_nibbles(packed))`` of bytes ``packed``, by a table of both values of a byte."""
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode_e2m1(unpack_nibbles(every)).view(torch.int64)
    return _look_up(pairs, packed).view(torch.float32)


def pack_nibbles(code: Tensor) -> Tensor:
    """Two of ``code``, 4-bit codes, in a byte along the last dimension, the even column in the low nibble."""
    pair = code.contiguous().view(-1).view(torch.int16)  # flat: a dimension of 1 may have any stride
    return (pair | pair >> 4).to(torch.uint8).view(*code.shape[:-1], code.shape[-1] // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes that ``pack_nibbles`` packed into bytes ``packed``."""
    pair = packed.contiguous().view(-1).to(torch.int16)  # flat: an empty tensor may have any strides
    code = ((pair | pair << 4) & 0x0F0F).view(torch.uint8)
    return code.view(*packed.shape[:-1], 2 * packed.shape[-1])


# ---------------------------------------------------------------------------------------------- E8M0


def cast_e8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is at least ``x`` (fp32, non-negative), as a biased exponent byte.

    Zero gives 0 (that is 2^-127), what exceeds 2^127 gives 254, NaN and infinity give 255, which means NaN.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    subnormal = exponent == 0
    up = torch.where(subnormal, mantissa > 0x400000, (mantissa != 0) & (exponent != 254))
    return torch.where(x.isfinite(), exponent + up.int(), 255).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """The fp32 powers of two of exponent bytes ``code``; 255 is NaN."""
    exponent = code.int()
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)  # 2^-127 is subnormal in fp32
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))


def inverse_e8m0(code: Tensor) -> Tensor:
    """``2^(127 - code)``, exactly, of ``code``: the factor that undoes ``decode_e8m0``, also where that is NaN."""
    exponent = 254 - code.int()
    normal = (exponent.clamp(min=1) << 23).view(torch.float32)
    subnormal = torch.where(exponent == 0, 0x400000, 0x200000).to(torch.int32).view(torch.float32)
    return torch.where(exponent >= 1, normal, subnormal)
