"""A product of an operand whose rows are divided over ranks: parts are multiplied while others arrive.

A part is an operand of its own, and its product with the other operand is some rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.distributed.part_gathers import OperandGather
from lpq.formats import Storage
from lpq.formats.layout import as_bytes
from lpq.kernels.table import bound_once
from lpq.operations.binding import Multiply, Product, on_device, operand_like, operand_of
from lpq.operations.bound import bind_writing
from lpq.operations.cut import Cut
from lpq.operations.operators import can_call_directly, define
from lpq.torch_private import symmetric

_writing = bound_once(bind_writing)


def can_overlap(cut: Cut, x: Tensor) -> bool:
    """Whether parts of this tensor can be multiplied as they arrive: a rank's rows lie side by side in the whole, and
    its device can read the rows of other ranks. All ranks decide alike."""
    return cut.chunks_per_rank == 1 and x.numel() > 0 and symmetric.serves(x.device)


def of_parts(p: Product, size: tuple[int, int], cut: Cut, group: str, whole: bool) -> Multiply:
    """Multiply a left operand of which this rank has a part of this ``size``, and whose gather was not begun. If
    wanted, the buffers of the ``whole`` operand take the place of the part's, in their list."""
    part = p.a._replace(shape=size)
    other, gather, dtype, fast = p.b, OperandGather(part, 0, cut, group), p.dtype, p.fast_accumulate
    texts = part.quantizer.text, other.quantizer.text
    shapes, dtypes = (part.shape, other.shape), (part.dtype, other.dtype)

    def multiply(a: list[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        run: Any = _arriving_gemm if can_call_directly(a[0]) else torch.ops.lpq.arriving_gemm
        y: Tensor
        y, *arrivals = run(list(a), list(b), bias, *texts, *shapes, *dtypes, dtype, fast, cut.ranks, group, whole)
        if whole:
            a[:] = gather.joined(a, arrivals)
        return y

    return multiply  # type: ignore[return-value]


def _arriving_gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast: bool, ranks: int, group: str, whole: bool,
) -> list[Tensor]:  # fmt: skip
    part, other = operand_of(a, qa, shape_a, dtype_a), operand_of(b, qb, shape_b, dtype_b)
    y, *arrivals = _results(a, b, bias, qa, qb, shape_a, shape_b, dtype_a, dtype_b, dtype, fast, ranks, group, True)
    product = Product(operand_like(part), operand_like(other), dtype, y.device, fast, dispatched=True)
    write, rows = _writing(product), y.chunk(ranks)
    moves = [buffer.unit(0) is not None for buffer in part.quantizer.layout]

    def consume(arrived: list[Tensor], rank: int) -> None:
        pieces = iter(arrived)
        buffers = [next(pieces).view(t.dtype).view(t.shape) if moved else t for t, moved in zip(a, moves, strict=True)]
        write(buffers, b, bias, rows[rank])

    with on_device(y.device):
        symmetric.gather_and_consume(_bytes_of(part), consume, arrivals, group, whole)
    return [y, *arrivals] if whole else [y]


def _results(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast: bool, ranks: int, group: str, whole: bool,
) -> list[Tensor]:  # fmt: skip
    """The results, without values: the product and, if the whole operand is wanted, its bytes."""
    y = a[0].new_empty((shape_a[0] * ranks, shape_b[0]), dtype=dtype)
    if not whole:
        return [y]
    pieces = _bytes_of(operand_of(a, qa, shape_a, dtype_a))
    return [y, *(t.new_empty(t.numel() * ranks) for t in pieces)]


def _bytes_of(part: Storage) -> list[Tensor]:
    """The bytes of the buffers that are not the same for all parts of the rows."""
    buffers = zip(part.quantizer.layout, part.tensors(), strict=True)
    return [as_bytes(t) for buffer, t in buffers if buffer.unit(0) is not None]


define(
    "arriving_gemm(Tensor[] a, Tensor[] b, Tensor? bias, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast, int ranks, str group, bool whole) "
    "-> Tensor[]",
    _arriving_gemm,
    _results,
)
