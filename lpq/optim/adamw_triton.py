"""The kernel of AdamW's step, with the moments in any two formats that have tiles in Triton.

A program decodes a tile of both moments, steps the parameter and encodes them again: nothing else is in memory. One
launch steps many parameters, which a table names: small ones would each take the host longer than the GPU. One alone
needs no table.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.kernels.host_to_device import on_device
from lpq.kernels.triton import launch
from lpq.kernels.triton.numbers import value_of, widen
from lpq.kernels.triton.tiles import block_amax, load_tile, place_of_tile, spread, store_values
from lpq.operations.stored_tile import ALIGNMENT, StoredTile

ELEMENTS = 2048
"""The elements of a tile."""


FIELDS = tl.constexpr(10)
"""The numbers of a parameter in the table: six addresses, rows, columns, tiles side by side, and its first program."""
ALIGNED_TO = tl.constexpr(ALIGNMENT)


@triton.jit
def _entry(table, count):
    """Where the table tells of the parameter that this program steps: the last one that begins before it."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(table + middle * FIELDS + 9) <= tl.program_id(0)
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return table + low * FIELDS


@triton.jit
def _pointer(entry, index: tl.constexpr, like, ALIGNED: tl.constexpr):
    """An address of the table, as a pointer to the type of another one."""
    pointer = tl.load(entry + index).to(like.dtype)
    return tl.multiple_of(pointer, ALIGNED_TO) if ALIGNED else pointer


@triton.jit(do_not_specialize=["count"])
def _step(
    p, gradient, m_codes, m_scales, root_codes, root_scales, rows, cols, table, count,
    keep, toward, second, fresh, correct, eps, rate,
    READ_M: tl.constexpr, WRITE_M: tl.constexpr, M: tl.constexpr,
    READ_ROOT: tl.constexpr, WRITE_ROOT: tl.constexpr, ROOT: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """With a table the tensors are of any parameter of it: it has addresses, and no types."""
    if table is None:
        row, col = place_of_tile(cols, HIGH, WIDE)
    else:
        entry = _entry(table, count)
        p, gradient = _pointer(entry, 0, p, ALIGNED), _pointer(entry, 1, gradient, ALIGNED)
        m_codes, m_scales = _pointer(entry, 2, m_codes, ALIGNED), _pointer(entry, 3, m_scales, ALIGNED)
        root_codes, root_scales = _pointer(entry, 4, root_codes, ALIGNED), _pointer(entry, 5, root_scales, ALIGNED)
        rows, cols = tl.load(entry + 6), tl.load(entry + 7)
        if ALIGNED:
            cols = tl.multiple_of(cols, ALIGNED_TO)
        across, first = tl.load(entry + 8).to(tl.int32), tl.load(entry + 9).to(tl.int32)
        row, col = place_of_tile(cols, HIGH, WIDE, first, across)
    g = widen(load_tile(gradient, row, col, rows, cols, HIGH, WIDE))
    if MAXIMIZE:
        g = -g
    m = READ_M(m_codes, m_scales, row, col, rows, cols, M, HIGH, WIDE)
    root = READ_ROOT(root_codes, root_scales, row, col, rows, cols, ROOT, HIGH, WIDE)
    m = m + (g - m) * toward
    root = tl.sqrt_rn(root * root * second + g * g * fresh)
    x = widen(load_tile(p, row, col, rows, cols, HIGH, WIDE))
    x = x * keep - tl.div_rn(m, root * correct + eps) * rate
    store_values(p, x, row, col, rows, cols)
    WRITE_M(m, m_codes, m_scales, row, col, rows, cols, M)
    if SHARE > 0.0:
        least = spread(value_of(block_amax(root, HIGH, WIDE // BLOCK)) * SHARE, HIGH, WIDE)
        root = tl.where(root > 0, tl.maximum(root, least, propagate_nan=tl.PropagateNan.ALL), root)
    WRITE_ROOT(root, root_codes, root_scales, row, col, rows, cols, ROOT)


def launch_step(
    tensors: Sequence[Tensor], entries: Sequence[Sequence[int]], aligned: bool, numbers: Sequence[float],
    maximize: bool, first: StoredTile, second: StoredTile, share: float,
) -> None:  # fmt: skip
    """Step parameters of the same dtypes on one device.

    Args:
        tensors: The first parameter, its gradient, and codes and scales of its first moment and of its second.
        entries: For each parameter the addresses of these tensors, and its rows and columns.
        aligned: Whether all addresses and columns are multiples of ``ALIGNMENT``.
        numbers: The seven numbers of the kernel, in their order.
        maximize: Whether gradients are negated.
        first: The functions of the first moment.
        second: The functions of the second moment.
        share: The least share of a block's largest root that is kept; 0: all are.
    """
    wide = max(first.width, second.width, 128)
    high = max(ELEMENTS // wide, 1)
    table: list[int] = []
    count = 0
    for entry in entries:
        rows, cols = entry[-2:]
        across = -(-cols // wide)
        table += (*entry, across, count)
        count += across * -(-rows // high)
    p, gradient, m_codes, m_scales, root_codes, root_scales = tensors
    one = len(entries) == 1
    where = (*entries[0][-2:], None) if one else (None, None, on_device(table, torch.int64, p.device))
    launch(
        _step, count, p, gradient, m_codes.view(torch.uint8), m_scales, root_codes.view(torch.uint8), root_scales,
        *where, len(entries), *numbers,
        READ_M=first.read, WRITE_M=first.write, M=first.options,
        READ_ROOT=second.read, WRITE_ROOT=second.write, ROOT=second.options,
        SHARE=share, BLOCK=second.width, MAXIMIZE=maximize, ALIGNED=aligned and not one, HIGH=high, WIDE=wide,
        num_warps=4,
    )  # fmt: skip
