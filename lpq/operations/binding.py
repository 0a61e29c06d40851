"""The tasks that a kernel binds: an encoding or a product, described without its tensors.

A ``KernelSpec`` may name, beside its ``impl``, a function that takes such a task and returns a function of the tensors.
All that depends on shapes, dtypes, devices and options is decided, checked and packed there, once. A step then
allocates and launches. ``cached_by_shape`` makes the ``impl`` from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from lpq import registry
from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import check_there
from lpq.formats.sections import Sections, piece
from lpq.kernels.launch_table import TableLaunch
from lpq.kernels.table import bound_once
from lpq.operations.exact_form import Form, Multiplicand, form_of
from lpq.operations.format_calls import transpose_reference
from lpq.operations.inputs import as_matrix
from lpq.operations.references import gemm_reference, quantize_reference
from lpq.registry.former_names import former
from lpq.torch_private import cuda

OUT_ALIGNED = 256
ALIGNED = 16
"""The alignment, in bytes, of matrices: a kernel that is bound to aligned ones may read pieces of this size."""


class Encoding(NamedTuple):
    """How matrices of one shape are encoded."""

    row: Any
    col: Any
    """The quantizers, of the format that binds, of the wanted operands; None for an operand that is not wanted."""
    shape: tuple[int, int]
    """The shape of the matrix, which is contiguous."""
    held: torch.dtype
    """The dtype of the matrix."""
    dtype: torch.dtype
    """The dtype that it is first rounded to."""
    device: torch.device
    given: tuple[bool, ...] = ()
    """For each statistic, in the order of ``declared``, whether it is given; empty: none is."""
    measure: bool = False
    """Whether the statistics are returned."""
    offset: int = 0
    """The first row of the matrix in the whole tensor."""
    exact: tuple[bool, bool] = (False, False)
    """Whether the row operand, and the column operand, is made in its exact form, to be multiplied in bf16 at once."""
    aligned: bool = True
    """Whether the matrix begins at a multiple of ``ALIGNED`` bytes."""
    apart: bool = False
    """Whether no result shares memory with another, and each lies in memory as its layout declares: an operator or
    compiled code returns them."""
    dispatched: bool = False
    """Whether the results are allocated where modes see it: an operator returns them."""
    sections: Sections | None = None
    """How the matrix is divided; None: it is one. A stack is the matrix of all its rows. ``given`` then has a value for
    each operand: whether the amaxes of sections are given for it. ``exact``: it is made as ``sectioned.DECODED``."""


Encoded = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
"""The buffers of the row operand, the buffers of the column operand and the statistics, each in the order declared."""
Encode = Callable[[Tensor, int, Sequence[Tensor | None], Tensor | None], Encoded]
"""``encode(x, at, stats, seed)``: ``at`` is the address of ``x``; ``stats`` are contiguous, and None where they are not
given. The device is the current one."""
Run = Callable[[Tensor, Sequence[Tensor | None], Tensor | None], Encoded]
"""``run(x, stats, seed)`` of any matrix; otherwise as ``Encode``."""


class Operand(NamedTuple):
    """An operand. A bound step passes its buffers beside it, since they differ in each pass."""

    quantizer: Any
    """A quantizer of the format that binds."""
    shape: tuple[int, ...]
    """The shape of a matrix, or of a stack; of groups, the shape of the matrix of all rows, with the rows behind the
    last group."""
    dtype: torch.dtype
    form: Form | None = None
    """The exact form in place of codes; None: it is encoded. Groups have the matrix alone, at their places in the
    operand."""
    sections: Sections | None = None
    """How it is divided; None: it is one matrix."""
    dim: int = 0
    """The dimension along which groups lie, if there are groups."""
    tensors: Sequence[Tensor] = ()
    """The buffers of rows in groups, where a function is given the operand with them."""

    @classmethod
    def of_text(cls, text: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> Operand:
        """The operand of ``count`` tensors that an operator gets described by ``Storage.text``."""
        form, name = form_of(text, count)
        return cls(registry.quantizer(name), tuple(shape), dtype, form)

    @property
    def in_groups(self) -> bool:
        """Whether it is of rows in groups; the last of its buffers then has the ends of the groups."""
        return self.sections is not None and not self.sections.stack

    def storage(self, tensors: Sequence[Tensor]) -> Storage:
        """The operand that has these buffers."""
        quantizer, shape, dtype, form = self[:4]
        if form is None:
            storage: Storage = quantizer.storage.from_tensors(tensors, quantizer, shape, dtype)
            return storage
        return Multiplicand.from_matrix(tensors, form.constant, quantizer, shape, dtype)

    def over(self, tensors: Sequence[Tensor]) -> Storage:
        """The former name of ``storage``."""
        return former("Operand.over", Operand.storage)(self, tensors)

    def grouped(self, tensors: Sequence[Tensor]) -> Operand:
        """The operand of rows in groups with these buffers. The last tensor has the ends of the groups."""
        return self._replace(tensors=tensors[:-1])

    def group(self, number: int, start: int, stop: int, at: int) -> Storage:
        """The operand of one group, rows or columns ``[start, stop)`` of the whole, which begins at ``at``."""
        side, dim = self.quantizer, self.dim
        rows, cols = (stop - start, self.shape[1]) if dim == 0 else (self.shape[0], stop - start)
        pieces = [piece(b, t, number, at, rows, cols, dim) for b, t in zip(side.layout, self.tensors, strict=True)]
        if not side.plain:
            pieces = [b.laid(t) for b, t in zip(side.layout, pieces, strict=True)]
        storage: Storage = side.storage.from_tensors(pieces, side, (rows, cols), self.dtype)
        return storage


class Product(NamedTuple):
    """How operands of one shape are multiplied: ``decode(a) @ decode(b)ᵀ + bias``.

    If ``a`` has groups, each group is a product of its own: its rows times its matrix of the stack ``b``, with a row of
    ``bias`` for each group; or, along the contraction, its columns times the columns of the same group of ``b``. Rows
    of no group, and the products of empty groups, are zero.
    """

    a: Operand
    b: Operand
    dtype: torch.dtype
    device: torch.device
    fast_accumulate: bool = False
    dispatched: bool = False
    """Whether the result is allocated where modes see it: an operator returns it."""


Multiply = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor]
"""``multiply(a, b, bias)`` of the buffers of two operands. The device is the current one.

A function that takes ``out`` as well can write to a contiguous matrix that begins at a multiple of ``OUT_ALIGNED``
bytes. It returns that matrix, or another one, which is then copied there: it need not do so for each bias or dtype.
"""


Transpose = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""``transpose(buffers, out)``: write the buffers of the operand of the transposed matrix to ``out``. All are
contiguous; the buffers of ``out`` begin at multiples of ``ALIGNED`` bytes. The device is the current one."""


Transposes = Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]], None]
"""``transposes(buffers, out)``: as ``Transpose``, of several operands; each argument lists the buffers of one operand
after the other."""


EncodeSeveral = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor]]], TableLaunch]
"""``at(matrices, stats, buffers)``: a launch that encodes an operand of each of several matrices. It is bound to the
addresses of the matrices, their statistics and their buffers, which are all contiguous."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this GPU the current one inside. A compiler does that itself, and cannot trace the check."""
    if device.type != "cuda" or is_dynamo_compiling() or cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def called(impl: Callable[..., list[Tensor]], e: Encoding) -> Run:
    """Make a call of a kernel that binds nothing."""
    row, col, offset, measure = e.row, e.col, e.offset, e.measure
    at = len(row.layout) if row is not None else 0
    end = at + (len(col.layout) if col is not None else 0)

    def run(x: Tensor, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        out = impl(as_matrix(x), stats, row, col, seed, offset, measure)
        return out[:at], out[at:end], out[end:]

    return run


def by_reference(e: Encoding) -> Run:
    """Make an encoding by the formats' own code."""
    return rounded(partial(called, quantize_reference), e)


def rounded(make: Callable[[Encoding], Run], e: Encoding) -> Run:
    """Make an encoding that reads matrices in the dtype which they are rounded to; others are rounded before."""
    run, dtype = make(e._replace(held=e.dtype)), e.dtype
    return run if e.held is dtype else lambda x, stats, seed: run(x.to(dtype), stats, seed)


def aligned(bind: Callable[[Encoding], Encode | None], e: Encoding) -> Run:
    """Bind an encoding to aligned matrices. A matrix that is not contiguous is copied first; a misaligned one is
    encoded by another function, which is bound when the first comes."""
    encode = bind(e) if 0 not in e.shape else None
    if encode is None:
        return by_reference(e)
    misaligned = cache(lambda: bind(e._replace(aligned=False)))

    def run(x: Tensor, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        at = x.data_ptr()
        if x.is_contiguous() and not at % ALIGNED:
            return encode(x, at, stats, seed)
        x = x.contiguous()
        at = x.data_ptr()
        how = encode if at % ALIGNED == 0 else misaligned()
        assert how is not None
        return how(x, at, stats, seed)

    return run


def cached_by_shape(bind: Callable[[Encoding], Encode | None]) -> Callable[..., list[Tensor]]:
    """Make the ``impl`` of a ``quantize`` from its ``bind``. The bound functions of the last few shapes are kept."""
    bound = bound_once(partial(aligned, bind))

    def quantize(
        x: Tensor,
        stats: Sequence[Tensor | None],
        row: Quantizer | None,
        col: Quantizer | None,
        seed: Tensor | None,
        offset: int,
        measure: bool,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Encode as the reference does."""
        flags = tuple(s is not None for s in stats)
        e = Encoding(row, col, (x.shape[0], x.shape[1]), x.dtype, dtype or x.dtype, x.device, measure=measure)
        e = e._replace(given=flags if True in flags else (), offset=offset, apart=True, dispatched=True)
        with on_device(x.device):
            stats = [None if s is None else s.contiguous() for s in stats]
            of_row, of_col, measured = bound(e)(x, stats, seed)
        return [*of_row, *of_col, *measured]

    return quantize


def operand_of(tensors: Sequence[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype) -> Storage:
    """The operand of these tensors, as an operator gets it."""
    check_there(tensors[0])
    return Operand.of_text(text, len(tensors), shape, dtype).storage(tensors)


def operand_like(storage: Storage) -> Operand:
    """Describe an operand without its buffers."""
    form = None
    if isinstance(storage, Multiplicand):
        form = Form(storage.form.factor is not None, storage.form.constant)
    return Operand(storage.quantizer, storage.shape, storage.dtype, form)


def cached_product(bind: Callable[[Product], Multiply | None]) -> Callable[..., Tensor]:
    """Make the ``impl`` of a ``gemm`` from its ``bind``, as ``cached_by_shape`` does."""
    bound = bound_once(bind)

    def gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False) -> Tensor:
        """Multiply as the reference does, up to the order of sums."""
        device = a.device
        product = Product(operand_like(a), operand_like(b), dtype, device, fast_accumulate, dispatched=True)
        multiply = bound(product)
        if multiply is None:
            return gemm_reference(a, b, bias, dtype)
        with on_device(device):
            return multiply(a.tensors(), b.tensors(), bias)

    return gemm


def cached_transpose(bind: Callable[[Operand, torch.device], Transpose]) -> Callable[[Storage], Storage]:
    """Make the ``impl`` of a ``transpose`` from its ``bind``, as ``cached_by_shape`` does."""
    bound = bound_once(bind)

    def transpose(operand: Storage) -> Storage:
        """Transpose as the reference does."""
        (rows, cols), quantizer, device = operand.shape, operand.quantizer, operand.device
        if not rows or not cols:
            return transpose_reference(operand).map(torch.clone)
        transposed = quantizer.storage.empty(quantizer, (cols, rows), operand.dtype, device)
        turn = bound(operand_like(operand), device)
        with on_device(device):
            turn([t.contiguous() for t in operand.tensors()], transposed.tensors())
        return transposed

    return transpose


unbound = former("lpq.operations.binding.unbound", cached_by_shape)
unbound_product = former("lpq.operations.binding.unbound_product", cached_product)
unbound_transpose = former("lpq.operations.binding.unbound_transpose", cached_transpose)
