"""Arguments for the kernels of an operation: matrices of every kind, and every call that the core may make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lpq import operations
from lpq.formats import Quantizer, Storage
from lpq.testing.operands import SEED, encode, normal, unit
from lpq.testing.table import DTYPES, LARGE, PLACES

RAGGED = (33, 80)
SHAPES = ((256, 512), (128, 128), RAGGED, (5, 77), (1, 1), (0, 64), (64, 0))
"""Whole blocks, ragged edges, odd sizes, one element, no rows, no columns."""
OTHERS = ((144, 144), (256, 256), LARGE)
"""Squares, and a large matrix of odd sizes."""
SIZES = "numbers of all sizes"


def matrices(dtypes: Sequence[torch.dtype], largest: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices that a kernel is tried on, and a name for each; shapes have at most ``largest`` elements.
    With several dtypes, as for the default options, squares and a large matrix of odd sizes are among them."""
    for shape in (*SHAPES, *OTHERS) if len(dtypes) > 1 else SHAPES:
        if math.prod(shape) <= largest:
            yield "normal values", normal(*shape, dtype=dtypes[0])
    for name, at in PLACES.items():
        x = normal(*RAGGED, dtype=dtypes[0])
        if at is not None:
            x[at] = 64
            yield name, x
    for dtype in dtypes:
        x = normal(*RAGGED, dtype=dtype)
        yield "normal values", x
        yield SIZES, of_all_sizes(dtype)
        for value in (torch.inf, -torch.inf, torch.nan):  # one in a block: its neighbours may stay unchanged
            odd = x.clone()
            odd[3, 70] = value
            yield f"one {value}", odd
    wider = normal(96, 100, dtype=dtypes[0])
    yield "a transposed matrix", wider[:80, :33].t()
    yield "a slice of a matrix", wider[1:34, 3:83]


def of_all_sizes(dtype: torch.dtype) -> Tensor:
    """From the least subnormal number to the largest one, zeros of both signs among them."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    sizes = torch.linspace(math.log2(least), math.log2(info.max), math.prod(RAGGED), dtype=torch.float64).exp2()
    sizes[0], sizes[-1], sizes[1::97] = least, info.max, 0.0
    mixed = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0))
    sizes[::2] *= -1
    return sizes.clamp(-info.max, info.max)[mixed].view(RAGGED).to(dtype)


def calls(op: str, row: Quantizer | None, col: Quantizer | None, x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """All ways to call an operation for a matrix, or for its operand, and what each is."""
    if op == "measure":
        yield "", (x, row, col)
    elif op == "quantize":
        yield from _of_quantize(row, col, x)
    else:
        assert row is not None
        other = fresh(encode(col, multiplied(x))) if col is not None else None
        yield from of_operands(op, fresh(encode(row, x)), other)


def of_operands(op: str, a: Storage, b: Storage | None = None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """All ways to call an operation for an operand, or for two."""
    other = torch.float32 if a.dtype != torch.float32 else torch.bfloat16
    if op == "transpose":
        yield "", (a,)
    elif op == "decode":
        for dtype in (a.dtype, other):
            yield f"to {dtype}", (a, dtype)
    else:
        assert b is not None
        bias = normal(1, b.shape[0], a.dtype, seed=2)[0].to(a.device)
        for added, dtype, fast in (
            (None, a.dtype, False),
            (bias, other, True),
            (None, other, True),
            (bias, a.dtype, False),
            (None, other, False),
        ):
            yield f"as {dtype}, bias {added is not None}, fast_accumulate {fast}", (a, b, added, dtype, fast)


def multiplied(x: Tensor) -> Tensor:
    """Another matrix to multiply ``x`` with, which has equally many columns and more rows, an odd number if the rows of
    ``x`` are odd."""
    rows, cols = x.shape
    return normal(2 * rows + (rows % 16 > 0 or rows == 0), cols, dtype=x.dtype, seed=1)


def _of_quantize(row: Quantizer | None, col: Quantizer | None, x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    own, others = (operations.measure_reference(of, row, col) for of in (x, x * 0.5))
    stochastic = any(side.stochastic for side in (row, col) if side is not None)
    seed = torch.tensor(SEED, device=x.device)
    unneeded = seed if stochastic else None
    yield "its statistics given", (x, own, row, col, seed, 0, False)
    yield "no statistics given", (x, (), row, col, unneeded, 0, False)
    yield "its statistics asked for", (x, [None] * len(own), row, col, unneeded, 16, True)
    if own:
        yield "another matrix's statistics given", (x, _views(others), row, col, unneeded, 32, False)
        yield "another matrix's given, its own asked for", (x, _views(others), row, col, unneeded, 0, True)
    if len(own) > 1:
        yield (
            "one of another matrix's given",
            (x, [*_views(others[:1]), *[None] * (len(own) - 1)], row, col, unneeded, 0, False),
        )


def _views(stats: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in one memory, after another number, as a reduction over ranks leaves them."""
    together = torch.cat([stats[0].new_zeros(1), *(s.flatten() for s in stats)])
    views, at = [], 1
    for stat in stats:
        views.append(together[at : at + stat.numel()].view(stat.shape))
        at += stat.numel()
    return views


def fresh(operand: Storage) -> Storage:
    """The operand as encoding leaves it in memory."""
    buffers = [b.laid(t) for b, t in zip(operand.quantizer.layout, operand.tensors(), strict=True)]
    return operand.from_tensors(buffers, operand.quantizer, operand.shape, operand.dtype)


def parts(sides: Sequence[Quantizer], device: str) -> list[Storage]:
    """Operands as slicing a quantized tensor leaves them, views of larger ones; none where that cuts a block."""
    rows, cols = (math.lcm(16, *(unit(side, dim) for side in sides)) for dim in (0, 1))
    pieces = []
    for i, side in enumerate(sides):
        x = normal((4 + i) * rows, 4 * cols, dtype=DTYPES[0], seed=i)
        whole: Storage = on(device, fresh(encode(side, x)))
        below = whole.narrow(0, rows, x.shape[0])
        part = below.narrow(1, cols, 4 * cols) if below is not None else None
        if part is not None:
            pieces.append(part)
    return pieces if len(pieces) == len(sides) else []


def on(device: str, value: Any) -> Any:
    """Arguments on another device, with the strides and the offset that they have."""
    if isinstance(value, tuple | list):
        return type(value)(on(device, one) for one in value)
    if isinstance(value, Storage):
        return value.map(lambda buffer: on(device, buffer))
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return memory.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
