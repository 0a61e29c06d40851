"""The references of quantize and gemm, made of the methods of formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.formats.random_bits import RandomBits
from lpq.operations.format_calls import encoded_by, transpose_reference
from lpq.operations.measuring import measure_reference
from lpq.operations.operators import unaliased
from lpq.operations.sides import shared
from lpq.torch_private.dispatch import autocasts


def quantize_reference(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
    across: int = 0,
) -> list[Tensor]:
    """Return the buffers of the wanted operands in the order of their layouts, the row operand's first; then, with
    ``measure``, the statistics of ``x``.

    Args:
        x: The matrix.
        stats: The statistics to encode with, in the order in which ``measure_reference`` returns them. They may come
            from other ranks or steps, and be views of one memory. Each that is None is measured; with ``()`` all are.
        row: The quantizer of the row operand; None: it is not wanted.
        col: The quantizer of the column operand; None: it is not wanted.
        seed: The seed of random bits; None if no operand rounds stochastically.
        offset: The first row of ``x`` in the whole tensor.
        measure: Whether statistics are returned.
        across: The first column of ``x`` in the whole tensor.
    """
    measured = measure_reference(x, row, col) if measure or not stats or None in stats else []
    all_stats = [m if s is None else s for s, m in zip(stats or measured, measured or stats, strict=True)]
    out: list[Tensor] = []
    encoded = None
    if row is not None:
        bits = RandomBits(seed, 0, (offset, across)) if row.stochastic and seed is not None else None
        encoded = encoded_by(row, x, _named(row, all_stats), bits)
        out += encoded.tensors()
    if col is not None:
        if encoded is not None and shared(row, col):
            out += transpose_reference(encoded).tensors()
        else:
            bits = RandomBits(seed, 1, (across, offset)) if col.stochastic and seed is not None else None
            named = _named(col, all_stats[len(all_stats) - len(col.stats) :])
            out += encoded_by(col, x.t(), named, bits).tensors()
    return unaliased(out + (measured if measure else []), (x, *stats), row, col)


def _named(side: Quantizer, stats: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {s.name: cast("Tensor", t) for s, t in zip(side.stats, stats, strict=False)}


def plain_gemm(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if autocasts() and not a.is_meta and torch.is_autocast_enabled(a.device.type):  # it would round what is multiplied
        with torch.autocast(a.device.type, enabled=False):
            return plain_gemm(a, b, bias, dtype)
    common = torch.promote_types(a.dtype, b.dtype)
    bias = bias.to(common) if bias is not None else None
    product = torch.nn.functional.linear(a.to(common), b.to(common), bias)
    # torch.compile of torch 2.11 loses the gradient of a product that is cast to the dtype it has.
    return product if product.dtype == dtype else product.to(dtype)


def gemm_reference(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False
) -> Tensor:
    """Compute ``decode(a) @ decode(b)ᵀ + bias``, summed in fp32.

    Args:
        a: The left operand.
        b: The right operand.
        bias: One number for each row of ``b``, or None.
        dtype: The dtype of the result.
        fast_accumulate: Whether a kernel may sum in less than fp32; the reference never does.
    """
    if a.quantizer.basis == b.quantizer.basis:  # a rotation of both drops out of the product
        left, right = a.decode_rotated(), b.decode_rotated()
    else:
        left, right = a.decode(), b.decode()
    product = left.float() @ right.float().t()
    if bias is not None:
        product += bias.float()
    return product.to(dtype)
