"""The five operations on operands: measure, quantize, decode, transpose and gemm.

Each is a ``torch.library`` operator over plain tensors and quantizer strings, so that ``torch.compile`` and fake
tensors see one node with a known result. Its body asks the kernel table, and the reference, made of what the format
wrote, serves whatever no kernel serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lpq import registry
from lpq.core.layout import Stat
from lpq.core.philox import RandomBits
from lpq.core.storage import Storage
from lpq.ops import KernelError, choose

if TYPE_CHECKING:
    from lpq.core.quantizer import Quantizer

_library = torch.library.Library("lpq", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, body: Callable[..., Any], fake: Callable[..., Any], **options: Any) -> None:
    """Give an operator its body on every device, and what it returns for fake tensors."""
    name = schema[: schema.index("(")]
    _library.define(schema, **options)  # type: ignore[no-untyped-call]
    _library.impl(name, _without_autocast(body), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lpq::{name}", fake, lib=_library)


def _without_autocast(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body in the precision in which it is written: autocast would round the operands of a reference's matmul."""

    @wraps(body)
    def run(first: Tensor | list[Tensor], *args: Any) -> Any:
        device = (first if isinstance(first, Tensor) else first[0]).device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return body(first, *args)
        with torch.autocast(device, enabled=False):
            return body(first, *args)

    return run


def _quantizer(text: str) -> Quantizer | None:
    return cast("Quantizer", registry.quantizer(text)) if text else None


def _text(side: Quantizer | None) -> str:
    return side.text if side is not None else ""


def shared(row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether the column operand follows from the row operand."""
    return row is not None and row == col and row.transposable


def declared(row: Quantizer | None, col: Quantizer | None) -> list[tuple[Stat, int]]:
    """The statistics that these operands need, in order, and which of their dimensions is the tensor's first."""
    first = [(stat, 0) for stat in row.stats] if row is not None else []
    if shared(row, col) or col is None:
        return first
    return first + [(stat, 1) for stat in col.stats]


# ---------------------------------------------------------------------------------------------- measure


def measure(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """The local statistics of the matrix ``x`` that its operands need, in the order of ``declared``."""
    return cast("list[Tensor]", torch.ops.lpq.measure(x, _text(row), _text(col)))


def measure_reference(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """The statistics of ``x`` for these operands, in the order of ``declared``."""
    measured = _measure_side(row, x) if row is not None else []
    if col is None or shared(row, col):
        return measured
    return measured + _measure_side(col, x.t())


def _measure_side(side: Quantizer, x: Tensor) -> list[Tensor]:
    if x.numel() == 0:
        return [s.zeros(x.shape[0], x.shape[1], x.device) for s in side.stats]
    stats = side.measure(x) if side.stats else {}
    return [stats[s.name] for s in side.stats]


def _measure(x: Tensor, row: str, col: str) -> list[Tensor]:
    if _one_at_a_time("measure", row, col, x.device):
        return _distinct(_measure(x, row, "") + _measure(x, "", col), ())
    impl = choose("measure", tuple(t for t in (row, col) if t), x.device).impl or measure_reference
    return _distinct(impl(x, _quantizer(row), _quantizer(col)), ())


def _one_at_a_time(op: str, row: str, col: str, device: torch.device) -> bool:
    """Whether no kernel takes these two operands, which share nothing, together; each may have one of its own."""
    if not row or not col or shared(_quantizer(row), _quantizer(col)):
        return False
    try:
        return choose(op, (row, col), device).impl is None
    except KernelError:  # the reference is not allowed: each operand says for itself what it lacks
        return True


def _measure_fake(x: Tensor, row: str, col: str) -> list[Tensor]:
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
) -> tuple[Storage | None, Storage | None, list[Tensor]]:
    """The wanted operands of the matrix ``x``, and the statistics it measured if ``measure``.

    A statistic that is not given is measured here. Ordinary matrices (``Quantizer.plain``) are made in place of a call:
    an operator may not return a view of its input.
    """
    plain_row = row if row is not None and row.plain else None
    plain_col = col if col is not None and col.plain else None
    row_storage = _encode_side(plain_row, x, {}, None) if plain_row is not None else None
    if row_storage is not None and shared(plain_row, plain_col):
        col_storage: Storage | None = transpose_reference(row_storage)  # one cast serves both
    else:
        col_storage = _encode_side(plain_col, x.t(), {}, None) if plain_col is not None else None
    row, col = (None if plain_row else row), (None if plain_col else col)
    if row is None and col is None:
        return row_storage, col_storage, []
    if seed is None and any(side is not None and side.stochastic for side in (row, col)):
        seed = draw_seeds(x, x, 1)[0]
    out: list[Tensor] = torch.ops.lpq.quantize(x, stats or [], _text(row), _text(col), seed, offset, measure)
    rows, cols = x.shape
    at = 0
    if row is not None:
        at = len(row.storage.layout_for(row))
        row_storage = row.storage.wrap(out[:at], row, (rows, cols), x.dtype)
    if col is not None:
        end = at + len(col.storage.layout_for(col))
        col_storage = col.storage.wrap(out[at:end], col, (cols, rows), x.dtype)
        at = end
    return row_storage, col_storage, out[at:]


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
    ``measure``, the statistics of ``x``. A statistic that is not given is measured."""
    measured = measure_reference(x, row, col) if measure or not stats or None in stats else []
    known = [m if s is None else s for s, m in zip(stats or measured, measured or stats, strict=True)]
    out: list[Tensor] = []
    encoded = None
    if row is not None:
        bits = RandomBits(seed, 0, (offset, 0)) if row.stochastic and seed is not None else None
        encoded = _encode_side(row, x, _named(row, known), bits)
        out += encoded.tensors()
    if col is not None:
        if encoded is not None and shared(row, col):
            out += transpose_reference(encoded).tensors()
        else:
            bits = RandomBits(seed, 1, (0, offset)) if col.stochastic and seed is not None else None
            named = _named(col, known[len(known) - len(col.stats) :])
            out += _encode_side(col, x.t(), named, bits).tensors()
    return out + (measured if measure else [])


def _named(side: Quantizer, stats: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {s.name: cast("Tensor", t) for s, t in zip(side.stats, stats, strict=False)}


def _encode_side(side: Quantizer, x: Tensor, stats: dict[str, Tensor], bits: RandomBits | None) -> Storage:
    storage = side.encode(x, stats) if bits is None else side.encode_stochastic(x, stats, bits)
    rows, cols = x.shape
    return storage.bind(side, (rows, cols), x.dtype)


def _quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: str,
    col: str,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    left, right = _quantizer(row), _quantizer(col)
    if left is not None and right is not None and _one_at_a_time("quantize", row, col, x.device):
        known = len(left.stats) if stats else 0
        first = _quantize(x, stats[:known], row, "", seed, offset, measure)
        second = _quantize(x, stats[known:], "", col, seed, offset, measure)
        at, end = len(left.storage.layout_for(left)), len(right.storage.layout_for(right))
        return _distinct(first[:at] + second[:end] + first[at:] + second[end:], stats)
    impl = choose("quantize", tuple(t for t in (row, col) if t), x.device).impl or quantize_reference
    return _distinct(impl(x, stats, left, right, seed, offset, measure), stats)


def _distinct(made: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    """What an operator may return: contiguous buffers, and neither an input nor a tensor twice. A format need not
    care: a value for the whole matrix can be a statistic as it came, and can serve both operands."""
    seen = {_memory(t) for t in given if t is not None}
    out: list[Tensor] = []
    for tensor in made:
        tensor = tensor.contiguous()
        out.append(tensor.clone() if _memory(tensor) in seen else tensor)
        seen.add(_memory(tensor))
    return out


def _memory(tensor: Tensor) -> int:
    """What a tensor and its views have in common."""
    return cast("int", tensor.untyped_storage()._cdata)


def _quantize_fake(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: str,
    col: str,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    rows, cols = x.shape
    out: list[Tensor] = []
    for side, shape in ((_quantizer(row), (rows, cols)), (_quantizer(col), (cols, rows))):
        if side is not None:
            out += side.storage.empty(side, shape, x.dtype, x.device).tensors()
    return out + (_empty_stats(x, _quantizer(row), _quantizer(col)) if measure else [])


# ---------------------------------------------------------------------------------------------- seeds


def draw_seeds(x: Tensor, owner: Tensor, count: int) -> Tensor:
    """Seeds from torch's generator, on the device of ``x``, without a host synchronisation.

    An operator of its own, because a compiler takes liberties with a mere ``randint``: what only backward uses it
    draws in backward, in another order. This one stays where ``x``, the layer's input, is; and ``owner``, the layer's
    weight, tells the draws of layers apart that share an input and would be merged.
    """
    return cast("Tensor", torch.ops.lpq.draw_seeds(x, owner, count))


def _draw_seeds(x: Tensor, owner: Tensor, count: int) -> Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, device=x.device)


def _draw_seeds_fake(x: Tensor, owner: Tensor, count: int) -> Tensor:
    return x.new_empty((count,), dtype=torch.int64)


# ---------------------------------------------------------------------------------------------- decode


def decode(operand: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that an operand stands for, in memory of its own."""
    if operand.quantizer.plain:
        check_there(operand.tensors()[0])
        return operand.decode().to(dtype, copy=True)
    return cast(
        "Tensor",
        torch.ops.lpq.decode(operand.tensors(), operand.quantizer.text, operand.shape, operand.dtype, dtype),
    )


def decode_reference(operand: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for, rounded once to ``dtype``."""
    return operand.decode().to(dtype)


def _decode(buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    operand = _operand(buffers, quantizer, shape, stored)
    impl = choose("decode", (quantizer,), buffers[0].device).impl or decode_reference
    return _distinct([impl(operand, dtype)], buffers)[0]


def _decode_fake(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return buffers[0].new_empty(shape, dtype=dtype)


def _operand(buffers: Sequence[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype) -> Storage:
    check_there(buffers[0])
    quantizer = cast("Quantizer", registry.quantizer(text))
    return quantizer.storage.wrap(buffers, quantizer, (shape[0], shape[1]), dtype)


def check_there(buffer: Tensor) -> None:
    """Refuse an operand of a sharded weight that was not gathered: its buffers have no memory then."""
    if buffer.numel() and not buffer.untyped_storage().size():
        raise RuntimeError(
            "this operand of a sharded weight is not there: forward gathers row operands and backward column operands. "
            "If forward runs again in backward inside a compiled module, wrap it with PyTorch's checkpoint_wrapper"
        )


# ---------------------------------------------------------------------------------------------- transpose


def transpose(operand: Storage) -> Storage:
    """The operand of the transposed matrix; the quantizer must be transposable."""
    quantizer, (rows, cols) = operand.quantizer, operand.shape
    if not quantizer.transposable:
        raise NotImplementedError(f"{quantizer} is not transposable: encode the transposed matrix in its place")
    if quantizer.plain:
        return transpose_reference(operand)
    out = torch.ops.lpq.transpose(operand.tensors(), quantizer.text, operand.shape, operand.dtype)
    return quantizer.storage.wrap(out, quantizer, (cols, rows), operand.dtype)


def transpose_reference(operand: Storage) -> Storage:
    """The operand of the transposed matrix."""
    return operand.transposed().bind(operand.quantizer, operand.shape[::-1], operand.dtype)


def _transpose(buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype) -> list[Tensor]:
    operand = _operand(buffers, quantizer, shape, stored)
    impl = choose("transpose", (quantizer,), buffers[0].device).impl or transpose_reference
    return _distinct(impl(operand).tensors(), buffers)


def _transpose_fake(buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype) -> list[Tensor]:
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
    if a.quantizer.plain and b.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(b.tensors()[0])
        return _plain_gemm(a.tensors()[0], b.tensors()[0], bias, dtype)
    return cast(
        "Tensor",
        torch.ops.lpq.gemm(
            a.tensors(), b.tensors(), bias, a.quantizer.text, b.quantizer.text,
            a.shape, b.shape, a.dtype, b.dtype, dtype, fast_accumulate,
        ),
    )  # fmt: skip


def _plain_gemm(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
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


def _gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    impl = choose("gemm", (qa, qb), a[0].device).impl or gemm_reference
    left, right = _operand(a, qa, shape_a, dtype_a), _operand(b, qb, shape_b, dtype_b)
    return cast("Tensor", impl(left, right, bias, dtype, fast_accumulate))


def _gemm_fake(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    return a[0].new_empty((shape_a[0], shape_b[0]), dtype=dtype)


# ---------------------------------------------------------------------------------------------- their schemas

_define(
    "measure(Tensor x, str row, str col) -> Tensor[]",
    _measure,
    _measure_fake,
)
_define(
    "quantize(Tensor x, Tensor?[] stats, str row, str col, Tensor? seed, int offset, bool measure) -> Tensor[]",
    _quantize,
    _quantize_fake,
)
_define(
    "draw_seeds(Tensor x, Tensor owner, int count) -> Tensor",
    _draw_seeds,
    _draw_seeds_fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)
_define(
    "decode(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored, ScalarType dtype) -> Tensor",
    _decode,
    _decode_fake,
)
_define(
    "transpose(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored) -> Tensor[]",
    _transpose,
    _transpose_fake,
)
_define(
    "gemm(Tensor[] a, Tensor[] b, Tensor? bias, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _gemm,
    _gemm_fake,
)
