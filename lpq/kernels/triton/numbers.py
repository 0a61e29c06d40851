"""Exact casts between fp32 and the numbers that formats are made of, for Triton kernels.

Each does what the function of its name in ``lpq.formats.elements`` does, for a block of values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
FLT_MAX = tl.constexpr(3.4028234663852886e38)
INTEGERS = tl.constexpr(0x4B000000)
"""The bits of 2^23, from which on fp32 has integers only: a sum with 2^23 is rounded to an integer, in its low bits."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter's casts differ from the references, which a GPU's instructions do not. Each function asks for the GPU
itself: where one calls another, older Tritons (3.6) compile both branches, also for GPUs that have no such type."""


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def value_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def size_of(x):
    """The bits of ``|x|``, which order as the magnitudes do, NaN above infinity."""
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


# ---------------------------------------------------------------------------------------------- bf16


@triton.jit
def widen(x):
    """Loaded values in fp32."""
    if x.dtype == tl.bfloat16:
        return value_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 rounded to the dtype of a result."""
    if dtype == tl.bfloat16 and not INTERPRETED and cuda_capability_geq(8, 0):
        return tl.where(x == x, x.to(tl.bfloat16), tl.full(x.shape, 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True))
    if dtype == tl.bfloat16:
        bits = bits_of(x)
        bits = tl.where(size_of(x) > INF, NAN, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


# ---------------------------------------------------------------------------------------------- 8-bit floats


@triton.jit
def cast_float8(product, x, E5M2: tl.constexpr):
    """The codes of ``product``: saturating, unless ``x``, of which ``product`` is a multiple, is not finite."""
    if not E5M2 and not INTERPRETED and cuda_capability_geq(8, 9):
        return (product - (x - x)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # x - x: NaN unless x is finite, or +0
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    LEAST: tl.constexpr = 113 if E5M2 else 121  # the biased exponent of the least normal number
    sign = (bits_of(product) >> 24) & 0x80
    magnitude = tl.minimum(value_of(size_of(product)), LARGEST)
    exponent = tl.maximum(bits_of(magnitude) & INF, LEAST << 23)
    # The last place of this power of two is the step of the 8-bit grid at the magnitude: a sum with it is rounded to
    # the grid, and counts the steps in its low bits.
    power = exponent + ((23 - MANTISSA) << 23)
    steps = bits_of(magnitude + value_of(power)) - power
    code = sign | (steps + ((exponent - (LEAST << 23)) >> (23 - MANTISSA)))
    nan = size_of(product) > INF
    if E5M2:
        code = tl.where(size_of(x) == INF, sign | 0x7C, code)
    else:
        nan = nan | (size_of(x) >= INF)
    return tl.where(nan, 0x7F, code).to(tl.uint8)


@triton.jit
def decode_float8(code, E5M2: tl.constexpr):
    """8-bit floats in fp32, by way of an fp16 of the same fields."""
    if not INTERPRETED and cuda_capability_geq(8, 9):
        return code.to(tl.uint8).to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True).to(tl.float32)
    code = code.to(tl.int32)
    if E5M2:
        return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    half = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


# ---------------------------------------------------------------------------------------------- E2M1


@triton.jit
def _number(x):
    """``x`` in which a NaN is a large positive number."""
    return tl.where(size_of(x) > INF, FLT_MAX, x)


@triton.jit
def _nearest(x):
    """A number from 0 to 2^22 as the nearest integer, the even one of two."""
    return bits_of(x + value_of(tl.full(x.shape, INTEGERS, tl.int32))) - INTEGERS


@triton.jit
def cast_e2m1(x):
    """Codes, one in each element. E2M1 consists of three uniform grids, as in the reference."""
    x = _number(x)
    magnitude = value_of(size_of(x))
    magnitude = tl.minimum(magnitude, 8.0)
    code = tl.minimum(_nearest(magnitude * 2.0), _nearest(magnitude) + 2)
    code = tl.minimum(tl.minimum(code, _nearest(magnitude * 0.5) + 4), 7)
    return code | ((bits_of(x) >> 28) & 8)


@triton.jit
def cast_e2m1_stochastic(x, random):
    """As ``cast_e2m1``, but rounded to either neighbour by a random byte for each element."""
    x = _number(x)
    magnitude = value_of(size_of(x))
    power = tl.minimum(tl.maximum(size_of(x) & INF, 127 << 23), 129 << 23)  # 1, 2 or 4: two steps
    magnitude += value_of(power) * 0.5 * (random.to(tl.float32) * 0.00390625)
    magnitude = tl.minimum(magnitude, 8.0)
    code = tl.minimum((magnitude * 2.0).to(tl.int32), magnitude.to(tl.int32) + 2)
    code = tl.minimum(tl.minimum(code, (magnitude * 0.5).to(tl.int32) + 4), 7)
    return code | ((bits_of(x) >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """The values of codes, whose bits are the top ones of an fp16 of which the exponent is 14 too low."""
    half = ((code & 7) << 9 | (code & 8) << 12).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def pack_nibbles(code):
    """Two codes in a byte along the columns, the even column in the low nibble."""
    HIGH: tl.constexpr = code.shape[0]
    WIDE: tl.constexpr = code.shape[1]
    even, odd = tl.split(tl.reshape(code, (HIGH, WIDE // 2, 2)))
    return (even | odd << 4).to(tl.uint8)


@triton.jit
def unpack_nibbles(packed):
    HIGH: tl.constexpr = packed.shape[0]
    WIDE: tl.constexpr = packed.shape[1]
    packed = packed.to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (HIGH, 2 * WIDE))


# ---------------------------------------------------------------------------------------------- E8M0


@triton.jit
def cast_e8m0(x):
    """The biased exponents of the least powers of two that are at least ``x``, which is not negative."""
    bits = bits_of(x)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = tl.where(exponent == 0, mantissa > 0x400000, (mantissa != 0) & (exponent != 254))
    return tl.where(exponent == 255, 255, exponent + up.to(tl.int32))


@triton.jit
def decode_e8m0(code):
    bits = tl.where(code == 0, 0x400000, code << 23)  # 2^-127 is subnormal in fp32
    return value_of(tl.where(code == 255, NAN, bits))


@triton.jit
def inverse_e8m0(code):
    """``2^(127 - code)``, also where the code is NaN's."""
    exponent = 254 - code
    subnormal = tl.where(exponent == 0, 0x400000, 0x200000)
    return value_of(tl.where(exponent >= 1, exponent << 23, subnormal))
