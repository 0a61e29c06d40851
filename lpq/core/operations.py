"""The five operations on operands: measure, quantize, decode, transpose and gemm.

Each has a body that asks the kernel table, and the reference, made of what the format wrote, serves whatever no kernel
serves. Around the body is a ``torch.library`` operator over plain tensors and quantizer strings, so that
``torch.compile`` and fake tensors see one node with a known result. Where nobody looks on, the body is called as the
function that it is: PyTorch's dispatcher costs the host more than all that lpq does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lpq import registry
from lpq.core.given import unfit_bias
from lpq.core.layout import Stat
from lpq.core.multiplicand import operand_of
from lpq.core.operators import alone, define, distinct, layouts
from lpq.core.philox import RandomBits
from lpq.core.quantizer import Quantizer
from lpq.core.returned import decoded_by, encoded_by, measured_by, transposed_by
from lpq.core.seeds import draw_seeds
from lpq.core.storage import Storage, check_there
from lpq.ops import Choice, KernelError, choose


def _quantizer(text: str) -> Quantizer | None:
    return cast("Quantizer", registry.quantizer(text)) if text else None


def _text(side: Quantizer | None) -> str:
    return side.text if side is not None else ""


def shared(row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether the column operand follows from the row operand."""
    return row is not None and (row is col or row == col) and row.transposable


def declared(row: Quantizer | None, col: Quantizer | None) -> list[tuple[Stat, int]]:
    """The statistics that these operands need, in order, and which of their dimensions is the tensor's first."""
    first = [(stat, 0) for stat in row.stats] if row is not None else []
    if shared(row, col) or col is None:
        return first
    return first + [(stat, 1) for stat in col.stats]


# ---------------------------------------------------------------------------------------------- measure


def measure(
    x: Tensor, row: Quantizer | None, col: Quantizer | None, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The local statistics of the matrix ``x`` that its operands need, in the order of ``declared``. If a ``dtype`` is
    given, they are those of ``x`` rounded to it."""
    if alone(x):
        return _measured(x, row, col, dtype or x.dtype)
    x = x if dtype is None else x.to(dtype)
    texts = _text(row), _text(col)
    return cast("list[Tensor]", torch.ops.lpq.measure(x, *texts, layouts(*texts)))


def measure_reference(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """The statistics of ``x`` for these operands, in the order of ``declared``."""
    measured = _measure_side(row, x) if row is not None else []
    if col is None or shared(row, col):
        return measured
    return measured + _measure_side(col, x.t())


def _measure_side(side: Quantizer, x: Tensor) -> list[Tensor]:
    if x.numel() == 0:
        return [s.zeros(x.shape[0], x.shape[1], x.device) for s in side.stats]
    return measured_by(side, x) if side.stats else []


def _measured(x: Tensor, row: Quantizer | None, col: Quantizer | None, dtype: torch.dtype) -> list[Tensor]:
    choice = serving("measure", row, col, x.device)
    if choice is None:
        return distinct(_measured(x, row, None, dtype) + _measured(x, None, col, dtype), ())
    if choice.impl is None:
        return distinct(measure_reference(x.to(dtype), row, col), ())
    impl = choice.impl if x.dtype is dtype else choice.rounding(dtype)
    measured: list[Tensor] = impl(x, row, col)
    return measured


def serving(op: str, row: Quantizer | None, col: Quantizer | None, device: torch.device) -> Choice | None:
    """What serves these operands together; None: each has what serves it by itself.

    That is so where no kernel takes two operands that share nothing together.
    """
    if row is None or col is None:
        side = row or col
        return choose(op, (side.text,) if side is not None else (), device)
    try:
        choice = choose(op, (row.text, col.text), device)
    except KernelError:  # the reference is not allowed: each operand says for itself what it lacks
        if shared(row, col):
            raise
        return None
    return choice if choice.impl is not None or shared(row, col) else None


def _measure(x: Tensor, row: str, col: str, layouts: str = "") -> list[Tensor]:
    return _measured(x, _quantizer(row), _quantizer(col), x.dtype)


def _measure_fake(x: Tensor, row: str, col: str, layouts: str = "") -> list[Tensor]:
    return _empty_stats(x, _quantizer(row), _quantizer(col))


def _empty_stats(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    rows, cols = x.shape
    return [
        x.new_empty(stat.grid(rows, cols) if dim == 0 else stat.grid(cols, rows), dtype=torch.float32)
        for stat, dim in declared(row, col)
    ]


# ---------------------------------------------------------------------------------------------- quantize


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None] | None,
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None = None,
    offset: int = 0,
    *,
    measure: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Storage | None, Storage | None, list[Tensor]]:
    """The wanted operands of the matrix ``x``, rounded to ``dtype`` if one is given, and the statistics it measured if
    ``measure``.

    A statistic that is not given is measured here. Ordinary matrices (``Quantizer.plain``) are made in place of a call:
    an operator may not return a view of its input.
    """
    if (row is not None and row.plain) or (col is not None and col.plain):
        return _with_plain(x if dtype is None else x.to(dtype), stats, row, col, seed, offset, measure)
    if seed is None and ((row is not None and row.stochastic) or (col is not None and col.stochastic)):
        seed = draw_seeds(x, x, 1)[0]
    dtype = dtype or x.dtype
    if alone(x):
        out = _encoded(x, stats or (), row, col, seed, offset, measure, dtype)
    else:
        texts = _text(row), _text(col)
        out = torch.ops.lpq.quantize(x.to(dtype), stats or [], *texts, seed, offset, measure, layouts(*texts))
    rows, cols = x.shape
    row_storage = col_storage = None
    at = 0
    if row is not None:
        at = len(row.layout)
        row_storage = row.storage.wrap(out[:at], row, (rows, cols), dtype)
    if col is not None:
        end = at + len(col.layout)
        col_storage = col.storage.wrap(out[at:end], col, (cols, rows), dtype)
        at = end
    return row_storage, col_storage, out[at:]


def _with_plain(
    x: Tensor,
    stats: Sequence[Tensor | None] | None,
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> tuple[Storage | None, Storage | None, list[Tensor]]:
    """``quantize`` where one operand at least is an ordinary matrix, which has no statistics."""
    plain_row = row if row is not None and row.plain else None
    plain_col = col if col is not None and col.plain else None
    row_storage = encoded_by(plain_row, x, {}, None) if plain_row is not None else None
    if row_storage is not None and shared(plain_row, plain_col):
        col_storage: Storage | None = transpose_reference(row_storage)  # one cast serves both
    else:
        col_storage = encoded_by(plain_col, x.t(), {}, None) if plain_col is not None else None
    row, col = (None if plain_row else row), (None if plain_col else col)
    if row is None and col is None:
        return row_storage, col_storage, []
    other_row, other_col, measured = quantize(x, stats, row, col, seed, offset, measure=measure)
    # Not by `or`, which asks the class of a storage for its truth: torch 2.11 cannot compile that.
    row_storage = other_row if row_storage is None else row_storage
    col_storage = other_col if col_storage is None else col_storage
    return row_storage, col_storage, measured


def quantize_reference(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """The buffers of the wanted operands in the order of their layouts, the row operand's first; then, if
    ``measure``, the statistics of ``x``.

    ``stats``: those to encode with, in the order in which ``measure_reference`` returns them. They may be those of
    other ranks or steps, and views of one memory. One that is None is measured; so are all if there is none, ``()``.
    ``seed`` is None if no operand rounds stochastically. ``offset`` is the first row of ``x`` in the whole tensor.
    """
    return distinct(quantize_as_written(x, stats, row, col, seed, offset, measure), stats, row, col)


def quantize_as_written(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """``quantize_reference`` as the format wrote it: a statistic may be a buffer as it came. ``torch.vmap`` runs it."""
    measured = measure_reference(x, row, col) if measure or not stats or None in stats else []
    known = [m if s is None else s for s, m in zip(stats or measured, measured or stats, strict=True)]
    out: list[Tensor] = []
    encoded = None
    if row is not None:
        bits = RandomBits(seed, 0, (offset, 0)) if row.stochastic and seed is not None else None
        encoded = encoded_by(row, x, _named(row, known), bits)
        out += encoded.tensors()
    if col is not None:
        if encoded is not None and shared(row, col):
            out += transpose_reference(encoded).tensors()
        else:
            bits = RandomBits(seed, 1, (0, offset)) if col.stochastic and seed is not None else None
            named = _named(col, known[len(known) - len(col.stats) :])
            out += encoded_by(col, x.t(), named, bits).tensors()
    return out + (measured if measure else [])


def _named(side: Quantizer, stats: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {s.name: cast("Tensor", t) for s, t in zip(side.stats, stats, strict=False)}


def _encoded(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    choice = serving("quantize", row, col, x.device)
    if choice is not None:
        if choice.impl is None:
            return quantize_reference(x.to(dtype), stats, row, col, seed, offset, measure)
        impl = choice.impl if x.dtype is dtype else choice.rounding(dtype)
        made: list[Tensor] = impl(x, stats, row, col, seed, offset, measure)
        return made
    assert row is not None
    assert col is not None
    known = len(row.stats) if stats else 0
    first = _encoded(x, stats[:known], row, None, seed, offset, measure, dtype)
    second = _encoded(x, stats[known:], None, col, seed, offset, measure, dtype)
    at, end = len(row.layout), len(col.layout)
    return distinct(first[:at] + second[:end] + first[at:] + second[end:], stats, row, col)


def _quantize(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, measure: bool,
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    return _encoded(x, stats, _quantizer(row), _quantizer(col), seed, offset, measure, x.dtype)


def _quantize_fake(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, measure: bool,
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    rows, cols = x.shape
    out: list[Tensor] = []
    for side, shape in ((_quantizer(row), (rows, cols)), (_quantizer(col), (cols, rows))):
        if side is not None:
            out += side.storage.fresh(side, shape, x).tensors()
    return out + (_empty_stats(x, _quantizer(row), _quantizer(col)) if measure else [])


# ---------------------------------------------------------------------------------------------- decode


def decode(operand: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that an operand stands for, in memory of its own."""
    first = operand.tensors()[0]
    if operand.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(first)
        return operand.decode().to(dtype, copy=True)
    if alone(first):
        check_there(first)
        return _decoded(operand, dtype)
    return cast(
        "Tensor",
        torch.ops.lpq.decode(operand.tensors(), operand.quantizer.text, operand.shape, operand.dtype, dtype),
    )


def decode_reference(operand: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for, rounded once to ``dtype``."""
    return decoded_by(operand).to(dtype)


def _decoded(operand: Storage, dtype: torch.dtype) -> Tensor:
    impl = choose("decode", (operand.quantizer.text,), operand.device).impl
    if impl is not None:
        decoded: Tensor = impl(operand, dtype)
        return decoded
    return distinct([decode_reference(operand, dtype)], operand.tensors())[0]


def _decode(buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return _decoded(operand_of(buffers, quantizer, shape, stored), dtype)


def _decode_fake(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return buffers[0].new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------- transpose


def transpose(operand: Storage) -> Storage:
    """The operand of the transposed matrix; the quantizer must be transposable."""
    quantizer, (rows, cols) = operand.quantizer, operand.shape
    if not quantizer.transposable:
        raise NotImplementedError(f"{quantizer} is not transposable: encode the transposed matrix in its place")
    if quantizer.plain:
        return transpose_reference(operand)
    first = operand.tensors()[0]
    if alone(first):
        check_there(first)
        return _transposed(operand)
    text = quantizer.text
    out = torch.ops.lpq.transpose(operand.tensors(), text, operand.shape, operand.dtype, layouts(text))
    return quantizer.storage.wrap(out, quantizer, (cols, rows), operand.dtype)


def transpose_reference(operand: Storage) -> Storage:
    """The operand of the transposed matrix."""
    return transposed_by(operand)


def _transposed(operand: Storage) -> Storage:
    impl = choose("transpose", (operand.quantizer.text,), operand.device).impl
    if impl is not None:
        made: Storage = impl(operand)
        return made
    turned = transpose_reference(operand)
    buffers = distinct(turned.tensors(), operand.tensors())
    return turned.wrap(buffers, turned.quantizer, turned.shape, turned.dtype)


def _transpose(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, layouts: str = ""
) -> list[Tensor]:
    return _transposed(operand_of(buffers, quantizer, shape, stored)).tensors()


def _transpose_fake(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, layouts: str = ""
) -> list[Tensor]:
    side = cast("Quantizer", registry.quantizer(quantizer))
    return side.storage.empty(side, (shape[1], shape[0]), stored, buffers[0].device).tensors()


# ---------------------------------------------------------------------------------------------- gemm


def gemm(
    a: Storage,
    b: Storage,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fast_accumulate: bool = False,
) -> Tensor:
    """``decode(a) @ decode(b)ᵀ + bias``, summed in fp32, as ``dtype`` (default: the dtype of ``a``).

    ``fast_accumulate`` lets a kernel sum in less than fp32 where the hardware offers that. The reference never does.
    """
    for operand in (a, b):
        if not isinstance(operand, Storage):
            raise TypeError(f"gemm multiplies operands, such as t.row and t.col, and not a {type(operand).__name__}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"gemm: the contractions differ: a is {list(a.shape)} and b is {list(b.shape)} "
            "(both operands have the contraction along their columns)"
        )
    dtype = dtype or a.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"gemm: dtype={dtype} cannot hold a product: pass a floating one")
    first, second = a.tensors(), b.tensors()
    if first[0].device != second[0].device:
        raise ValueError(f"gemm: a is on {first[0].device} and b on {second[0].device}: move one to the other")
    if bias is not None and (getattr(bias, "shape", None) != (b.shape[0],) or bias.device != first[0].device):
        raise unfit_bias(bias, b.shape[0], first[0].device)
    if a.quantizer.plain and b.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(second[0])
        return plain_gemm(first[0], second[0], bias, dtype)
    if alone(first[0]):
        check_there(first[0])
        check_there(second[0])
        return _product(a, b, bias, dtype, fast_accumulate, first[0].device)
    return cast(
        "Tensor",
        torch.ops.lpq.gemm(
            first, second, bias, a.text, b.text,
            a.shape, b.shape, a.dtype, b.dtype, dtype, fast_accumulate,
        ),
    )  # fmt: skip


def plain_gemm(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    common = torch.promote_types(a.dtype, b.dtype)
    bias = bias.to(common) if bias is not None else None
    product = torch.nn.functional.linear(a.to(common), b.to(common), bias)
    # torch.compile of torch 2.11 loses the gradient of a product that is cast to the dtype it has.
    return product if product.dtype == dtype else product.to(dtype)


def gemm_reference(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False
) -> Tensor:
    """``decode(a) @ decode(b)ᵀ + bias``, summed in fp32 whatever ``fast_accumulate`` allows."""
    if a.quantizer.rotation == b.quantizer.rotation:  # a rotation of both drops out of the product
        left, right = a.decode_rotated(), b.decode_rotated()
    else:
        left, right = a.decode(), b.decode()
    product = left.float() @ right.float().t()
    if bias is not None:
        product += bias.float()
    return product.to(dtype)


def _product(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool, device: torch.device
) -> Tensor:
    impl = choose("gemm", (a.quantizer.text, b.quantizer.text), device).impl or gemm_reference
    product: Tensor = impl(a, b, bias, dtype, fast_accumulate)
    return product


def _gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    left, right = operand_of(a, qa, shape_a, dtype_a), operand_of(b, qb, shape_b, dtype_b)
    return _product(left, right, bias, dtype, fast_accumulate, a[0].device)


def _gemm_fake(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    return a[0].new_empty((shape_a[0], shape_b[0]), dtype=dtype)


# ---------------------------------------------------------------------------------------------- their schemas

define('measure(Tensor x, str row, str col, str layouts="") -> Tensor[]', _measure, _measure_fake)
define(
    "quantize(Tensor x, Tensor?[] stats, str row, str col, Tensor? seed, int offset, bool measure, "
    'str layouts="") -> Tensor[]',
    _quantize,
    _quantize_fake,
)
define(
    "decode(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored, ScalarType dtype) -> Tensor",
    _decode,
    _decode_fake,
)
define(
    'transpose(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored, str layouts="") -> Tensor[]',
    _transpose,
    _transpose_fake,
)
define(
    "gemm(Tensor[] a, Tensor[] b, Tensor? bias, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _gemm,
    _gemm_fake,
)
