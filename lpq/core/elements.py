"""Element types: exact casts between fp32 and the 8-bit and 4-bit floats that formats are made of.

Every function is plain PyTorch, rounds to nearest even, saturates finite values and never turns a non-finite value
into a finite one where the element type has a NaN. ``Tensor.to(torch.float8_e4m3fn)`` saturates in torch 2.13 and
gives NaN from 465 on in torch 2.11; going through these functions, nobody has to know.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FLT_MAX = torch.finfo(torch.float32).max


def cast_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` (fp32) as an 8-bit float, saturating. NaN is 0x7f; an infinity is an infinity, or NaN in E4M3."""
    limit = torch.finfo(dtype).max
    code = x.clamp(-limit, limit).to(dtype).view(torch.uint8)  # clamp passes NaN on
    if dtype == E5M2:
        code = torch.where(x == torch.inf, 0x7C, torch.where(x == -torch.inf, 0xFC, code))
        code = torch.where(x.isnan(), 0x7F, code)
    else:
        code = torch.where(x.isfinite(), code, 0x7F)
    return code.to(torch.uint8).view(dtype)


def scale_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` as an 8-bit float: a product too large for fp32 saturates, a non-finite ``x`` stays so."""
    limit = torch.finfo(dtype).max
    product = x * scale
    return cast_float8(torch.where(x.isfinite(), product.clamp(-limit, limit), x), dtype)


def cast_e2m1(x: Tensor) -> Tensor:
    """``x`` (fp32) as E2M1 codes, one in each byte: sign bit 3, magnitude bits 0-2. NaN gives the largest magnitude."""
    magnitude = x.abs()
    # The grid is 0 .5 1 1.5 2 3 4 6. A tie goes to the even code, so every second boundary belongs to the upper code.
    code = (magnitude > 0.25).to(torch.uint8)
    for boundary, upper_on_tie in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (magnitude >= boundary) if upper_on_tie else (magnitude > boundary)
    code = torch.where(x.isnan(), 7, code)
    return (code | (torch.signbit(x).to(torch.uint8) << 3)).to(torch.uint8)


def decode_e2m1(code: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes, one in each byte."""
    grid = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32, device=code.device
    )
    return grid[code.int()]


def pack_nibbles(code: Tensor) -> Tensor:
    """Two 4-bit codes in a byte along the last dimension, the even column in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of ``pack_nibbles``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def cast_e8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is at least ``x`` (fp32, non-negative), as a biased exponent byte.

    Zero gives 0 (that is 2^-127), NaN and infinity give 255, which stands for NaN.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    subnormal = exponent == 0
    up = torch.where(subnormal, mantissa > 0x400000, (mantissa != 0) & (exponent != 254))
    code = torch.where(x.isfinite(), exponent + up.int(), 255)
    return code.to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """The fp32 powers of two of exponent bytes; 255 is NaN."""
    exponent = code.int()
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)  # 2^-127 is subnormal in fp32
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))


def inverse_e8m0(code: Tensor) -> Tensor:
    """``2^(127 - code)``, exactly: the factor that undoes ``decode_e8m0``, also where that is NaN."""
    exponent = 254 - code.int()
    normal = (exponent.clamp(min=1) << 23).view(torch.float32)
    subnormal = torch.where(exponent == 0, 0x400000, 0x200000).to(torch.int32).view(torch.float32)
    return torch.where(exponent >= 1, normal, subnormal)
