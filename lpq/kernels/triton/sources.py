"""Sources in Triton: how the elements of a tile are computed, by the operations of ``csrc/common/sources.cuh``.

``lpq.operations.source`` has the definition of each in plain PyTorch. A function rounds where PyTorch rounds, and fuses
a product with a sum where PyTorch's own operators do so. Exponentials are libdevice's, as in these operators:
``tl.exp`` has other bits. The GELU by erf is not here: Triton's libdevice has another ``erf`` than PyTorch 2.11.

The functions that ``Source.program`` names take three tiles in fp32, two columns with a number for each row, and two
rows with one for each column, of which a source has the first ones; the dtype of the matrices; and a function or
options. They return a tile of each output, which is rounded afterwards.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lpq.kernels.triton.numbers import narrow, reciprocal, size_of, widen

INF = tl.constexpr(0x7F800000)
BETA = tl.constexpr(0.797884560802865356)
KAPPA = tl.constexpr(0.044715)
"""Factors of the GELU by tanh."""
KAPPA_THRICE = tl.constexpr(0.13414499163627625)
"""Three times ``KAPPA``, multiplied in fp32."""


@triton.jit
def nearest(x, DTYPE: tl.constexpr):
    """The nearest number that an element of this dtype can be, in fp32."""
    return widen(narrow(x, DTYPE))


@triton.jit
def _fused(x, FACTOR: tl.constexpr, y):
    """``x * FACTOR + y``, rounded once."""
    return tl.fma(x, tl.full(x.shape, FACTOR, tl.float32), y)


# ---------------------------------------------------------------------------------------------- activations
# Each takes a tile, a gradient and the dtype: without GRADIENT it is the activation, with it the gradient of the tile.


@triton.jit
def silu(x, dy, DTYPE: tl.constexpr, GRADIENT: tl.constexpr):
    below = 1.0 + libdevice.exp(-x)
    if GRADIENT:
        sigmoid = reciprocal(below)
        y = dy * sigmoid * tl.fma(x, 1.0 - sigmoid, tl.full(x.shape, 1.0, tl.float32))
    else:
        y = tl.div_rn(x, below)
    return y


@triton.jit
def gelu_tanh(x, dy, DTYPE: tl.constexpr, GRADIENT: tl.constexpr):
    square = x * x
    tanh = libdevice.tanh(_fused(square * x, KAPPA, x) * BETA)
    if GRADIENT:
        inner = _fused(square, KAPPA_THRICE, tl.full(x.shape, 1.0, tl.float32)) * BETA
        y = dy * _fused(1.0 + tanh, 0.5, 0.5 * x * tl.fma(-tanh, tanh, tl.full(x.shape, 1.0, tl.float32)) * inner)
    else:
        y = 0.5 * x * (1.0 + tanh)
    return y


@triton.jit
def gelu_new(x, dy, DTYPE: tl.constexpr, GRADIENT: tl.constexpr):
    """The same with each operation rounded, as a module makes it of PyTorch's operators."""
    square = nearest(x * x, DTYPE)
    cube = nearest(nearest(square * x, DTYPE) * KAPPA, DTYPE)
    tanh = nearest(libdevice.tanh(nearest(nearest(x + cube, DTYPE) * BETA, DTYPE)), DTYPE)
    half = nearest(0.5 * x, DTYPE)
    above = nearest(1.0 + tanh, DTYPE)
    if GRADIENT:
        below = nearest(1.0 - nearest(tanh * tanh, DTYPE), DTYPE)
        inner = nearest(nearest(nearest(dy * half, DTYPE) * below, DTYPE) * BETA, DTYPE)
        of_cube = nearest(nearest(inner * KAPPA, DTYPE) * nearest(3.0 * square, DTYPE), DTYPE)
        y = nearest(inner + of_cube, DTYPE) + nearest(nearest(dy * above, DTYPE) * 0.5, DTYPE)
    else:
        y = half * above
    return y


@triton.jit
def relu(x, dy, DTYPE: tl.constexpr, GRADIENT: tl.constexpr):
    if GRADIENT:
        y = tl.where(x <= 0.0, 0.0, dy)
    else:
        y = tl.where((x > 0.0) | (size_of(x) > INF), x, 0.0)
    return y


# ---------------------------------------------------------------------------------------------- sources


@triton.jit
def alone(x, of_row, of_col, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """up -> its activation."""
    return (ACTIVATION(x[0], x[0], DTYPE, False),)


@triton.jit
def alone_backward(x, of_row, of_col, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """up, the gradient of what ``alone`` makes -> the gradient of up, and what it makes."""
    return ACTIVATION(x[0], x[1], DTYPE, True), ACTIVATION(x[0], x[1], DTYPE, False)


@triton.jit
def gated(x, of_row, of_col, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """gate, up -> the activation of gate times up."""
    return (nearest(ACTIVATION(x[0], x[1], DTYPE, False), DTYPE) * x[1],)


@triton.jit
def gated_backward(x, of_row, of_col, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """gate, up, the gradient of what ``gated`` makes -> gradients of gate and of up, and what it makes."""
    gate, up, dy = x
    active = nearest(ACTIVATION(gate, dy, DTYPE, False), DTYPE)
    return ACTIVATION(gate, nearest(dy * up, DTYPE), DTYPE, True), dy * active, active * up


@triton.jit
def rms_norm(x, of_row, of_col, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """x; the factor of its row -> the normalized element times the weight of its column. ``OPTIONS``: as ``NormKind``
    has them, ``offset`` and ``rounds``."""
    normed = x[0] * of_row[0]
    weight = of_col[0]
    if OPTIONS[0]:
        weight = 1.0 + weight
    if OPTIONS[1]:
        normed = nearest(normed, DTYPE)
    return (normed * weight,)


@triton.jit
def layer_norm(x, of_row, of_col, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """x; the mean and the factor of its row; the weight of its column, and the bias, if ``OPTIONS`` say so."""
    normed = (x[0] - of_row[0]) * of_row[1]
    if OPTIONS[0]:
        y = tl.fma(normed, of_col[0], of_col[1])
    else:
        y = normed * of_col[0]
    return (y,)
