"""Products of rows in groups on a device, in bf16 and all at once: the host does not read the offsets. Operands are
decoded first. A column operand, in which groups are padded, and an operand with a value for all rows of a group are
decoded in *tiles*: pieces of one group each, of the smallest number of rows that may be a shard. Rows of no group, and
the matrices of empty groups, are set to zero in the results: torch's grouped product leaves whatever lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.overrides import TorchFunctionMode

from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Buffer, Covering
from lpq.formats.sections import capacity, unit, with_values_of_rows
from lpq.kernels import choose
from lpq.kernels.sections import NEEDS, bind_clear_matrices, bind_clear_rows, bind_pad_ends
from lpq.kernels.table import serves
from lpq.operations.binding import Operand, Product
from lpq.operations.decoding import decode
from lpq.operations.exact_form import Multiplicand
from lpq.torch_private.dispatch import reaching_transforms

ALIGNED = 8
"""torch's grouped product takes rows of multiples of 16 bytes, which is this number of bf16 elements."""
AT_ONCE = 2**26
"""The bytes of operands that are decoded together by torch's operations; their values in fp32 have up to eight times as
many."""
Finish = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``finish(product, offs, bias)``: a product as a layer returns it."""


def spans(side: Quantizer, dim: int) -> bool:
    """Whether a statistic or a buffer spans all rows of a group."""
    declared: list[Covering] = [*side.stats, *side.layout]
    return any(covering.block[dim] is None for covering in declared)


# ---------------------------------------------------------------------------------------------- decoding


def dense(a: Operand, offs: Tensor, dtype: torch.dtype, *, rotated: bool) -> Tensor:
    """The rows that an operand stands for, ``[rows, cols]``; rows of no group have arbitrary values. ``rotated``:
    columns of a row operand are left in the basis in which they are stored; in a column operand, rows are."""
    rows, side, step = a.shape[a.dim], a.quantizer, unit(a.quantizer, a.dim)
    if a.form is not None and a.dim == 0:
        return a.tensors[0]
    if side.plain:
        values = a.tensors[0] if a.dim == 0 else a.tensors[0].t()
        return values.to(dtype).contiguous()
    if a.dim == 0 and step == 1 and not spans(side, 0) and not rotated:  # each row where it lies
        return decode(side.storage.from_tensors(a.tensors, side, a.shape, a.dtype), dtype)
    ends, index = offs.long(), torch.arange(rows, device=offs.device)
    group = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    if a.dim == 0 and step == 1 and not rotated:
        operand = with_values_of_rows(side, a.tensors, group, (rows, a.shape[1]), a.dtype)
        if operand is not None:
            return decode(operand, dtype)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    sizes = (ends - begins + step - 1) // step * step
    last = sizes.cumsum(0)
    values = _decoded(a, last, step, dtype, rotated)
    at = ((last - sizes)[group] + index - begins[group]).clamp(max=max(len(values) - 1, 0))
    return values[at] if len(values) else values.new_zeros((rows, values.shape[1]))


def _decoded(a: Operand, last: Tensor, step: int, dtype: torch.dtype, rotated: bool) -> Tensor:
    """The rows of all tiles one behind the other; ``last``: where each group ends in the operand."""
    side, dim = a.quantizer, a.dim
    size = capacity(a.shape[dim], len(last), step)

    def storage(height: int, buffers: Sequence[Tensor]) -> Storage:
        shape = (height, a.shape[1]) if dim == 0 else (a.shape[0], height)
        operand: Storage = side.storage.from_tensors(buffers, side, shape, a.dtype)
        return operand

    if not spans(side, dim):
        whole = storage(size, a.tensors)
        values = whole.decode_rotated().to(dtype) if rotated else decode(whole, dtype)
        return values if dim == 0 else values.t()

    def one(*each: Tensor) -> Tensor:
        tile = storage(step, each)
        return (tile.decode_rotated() if rotated else tile.decode()).to(dtype)

    count = size // step
    group = torch.searchsorted(last, torch.arange(count, device=last.device) * step, right=True)
    own = group.clamp(max=len(last) - 1)
    values = _of_each(one, [_of_tiles(b, v, own, count, dim) for b, v in zip(side.layout, a.tensors, strict=True)])
    return values.flatten(0, 1) if dim == 0 else values.transpose(1, 2).flatten(0, 1)


def _of_each(decode_one: Callable[..., Tensor], buffers: Sequence[Tensor]) -> Tensor:
    """Decode several operands, whose buffers are stacked. As many are decoded at a time as have ``AT_ONCE`` bytes
    together: by torch's operations, which need memory for each result."""
    together = max(1, AT_ONCE * len(buffers[0]) // max(1, sum(buffer.nbytes for buffer in buffers)))
    with _Batchable(), reaching_transforms():
        return torch.vmap(decode_one, chunk_size=together)(*buffers)


class _Batchable(TorchFunctionMode):
    """A mode in which ``torch.vmap`` runs functions with ``out=``, and ``x.view(dtype)``, which it runs by itself from
    torch 2.13 on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and isinstance(args[-1], torch.dtype):
            return _Reinterpreted.apply(*args)  # type: ignore[no-untyped-call]
        others = {**(kwargs or {})}
        out = others.pop("out", None)
        return func(*args, **others) if out is None else out.copy_(func(*args, **others))


class _Reinterpreted(torch.autograd.Function):
    """``x.view(dtype)``."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """There is no backward."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return x.movedim(in_dims[0], 0).view(dtype), 0


def _of_tiles(buffer: Buffer, tensor: Tensor, own: Tensor, count: int, dim: int) -> Tensor:
    """The part of a buffer of the operand that belongs to each tile."""
    if buffer.block == (None, None):
        return tensor[own]
    if buffer.block[dim] is None:
        return tensor[own].unsqueeze(1) if dim == 0 else tensor.transpose(0, 1)[own].unsqueeze(2)
    each = tensor.shape[dim] // max(count, 1)
    sizes = (*tensor.shape[:dim], count, each, *tensor.shape[dim + 1 :])
    return tensor.reshape(sizes).movedim(dim, 0)


def _stack_in_bf16(stack: Storage, rotated: bool) -> Tensor:
    """The matrices of a stack."""
    if isinstance(stack, Multiplicand):
        return stack.form.matrix
    if stack.quantizer.plain:
        return stack.tensors()[0].to(torch.bfloat16)
    if not rotated:
        return decode(stack, torch.bfloat16)
    quantizer, shape, dtype = stack.quantizer, stack.shape[1:], stack.dtype

    def one(*buffers: Tensor) -> Tensor:
        matrix: Storage = quantizer.storage.from_tensors(buffers, quantizer, shape, dtype)
        return matrix.decode_rotated().bfloat16()

    return _of_each(one, stack.tensors())


# ---------------------------------------------------------------------------------------------- multiplying


def why_not_multiplied(rows: int, cols: int) -> str | None:
    """Why torch's grouped product does not take matrices of these sizes; None if it does."""
    return f"sizes {rows} and {cols} are no multiples of {ALIGNED}" if rows % ALIGNED or cols % ALIGNED else None


def multiply_rows(a: Operand, b: Storage, offs: Tensor, *, rotated: bool) -> Tensor:
    """Multiply the rows of each group by its matrix, in bf16; ordinary matrices in the dtype that they have in
    common. ``rotated``: both are multiplied in the basis in which they are stored."""
    if a.quantizer.plain and b.quantizer.plain:
        common = torch.promote_types(a.tensors[0].dtype, b.tensors()[0].dtype)
        left, right = dense(a, offs, common, rotated=False), decode(b, common)
    else:
        left, right = dense(a, offs, torch.bfloat16, rotated=rotated), _stack_in_bf16(b, rotated)
    return grouped_mm(left, right.transpose(-2, -1), offs=offs)


def bind_in_rows(dtype: torch.dtype, device: torch.device) -> Finish:
    """Bind what turns products of rows into the result of a layer: with the bias, and with zeros behind the last
    group."""
    clear = bind_clear_rows(device) if serves(NEEDS, device) else None

    def in_rows(product: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
        product = product.to(dtype)
        if bias is None and clear is not None:
            clear(product, offs)
            return product
        row = torch.arange(len(product), device=offs.device)
        if bias is not None:
            group = torch.searchsorted(offs, row, right=True).clamp(max=len(offs) - 1)
            product = (product.float() + bias[group].float()).to(dtype)
        return torch.where((row < offs[-1])[:, None], product, product.new_zeros(()))

    return in_rows


def multiply_columns(a: Operand, b: Operand, offs: Tensor) -> Tensor:
    """Multiply, for each group, its columns of both operands, likewise."""
    common = torch.bfloat16
    if a.quantizer.plain and b.quantizer.plain:
        common = torch.promote_types(a.tensors[0].dtype, b.tensors[0].dtype)
    left, right = (dense(operand, offs, common, rotated=False) for operand in (a, b))
    return grouped_mm(left.t(), right, offs=offs)


def bind_product(p: Product) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]:
    """Bind the product of the buffers of two operands: ``multiply_rows``, or ``multiply_columns`` if both are columns.
    Where matrices are decoded already, nothing is left to do but to multiply them."""
    a, b = p.a, p.b
    if a.dim:
        step, first, second = unit(a.quantizer, 1), _bind_lines(a, p.device), _bind_lines(b, p.device)
        if first is None or second is None or step != unit(b.quantizer, 1):
            return lambda left, right: multiply_columns(a.grouped(left), b.grouped(right), left[-1])
        ends = bind_padded_ends(step, p.device)
        return lambda left, right: grouped_mm(first(left), second(right).t(), offs=ends(left[-1]))
    if a.form is not None and b.form is not None:
        return lambda left, right: grouped_mm(left[0], right[0].transpose(-2, -1), offs=left[-1])
    rotated = a.quantizer.basis == b.quantizer.basis and a.quantizer.basis is not None
    rows = None if rotated else _bind_rows(a, p.device)
    if rows is None:
        return lambda left, right: multiply_rows(a.grouped(left), b.storage(right), left[-1], rotated=rotated)

    def multiply(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        stack = _stack_in_bf16(b.storage(right), rotated=False)
        return grouped_mm(rows(left), stack.transpose(-2, -1), offs=left[-1])

    return multiply


def _bind_rows(a: Operand, device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Bind the decoded values, in bf16, of a row operand whose rows are decoded where they lie, as ``dense`` does; None
    if they are decoded in tiles, or need no decoding."""
    side = a.quantizer
    if a.form is not None or side.plain or spans(side, 0) or unit(side, 0) != 1:
        return None
    return _bind_whole(a, (a.shape[0], a.shape[1]), device)


def _bind_lines(a: Operand, device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Bind the decoded values, in bf16, of a column operand in its own layout, ``[cols, padded rows]``; None if it is
    decoded group by group."""
    side, sections = a.quantizer, a.sections
    if a.form is not None:
        return itemgetter(0)
    if side.plain or spans(side, 1) or side.rotation is not None or sections is None:
        return None
    return _bind_whole(a, (a.shape[0], capacity(a.shape[1], sections.number, unit(side, 1))), device)


def _bind_whole(a: Operand, shape: tuple[int, int], device: torch.device) -> Callable[[Sequence[Tensor]], Tensor]:
    """Bind the decoded values, in bf16, of an operand in groups that is decoded as one matrix of this shape."""
    side = a.quantizer
    impl = choose("decode", (side.text,), device).impl
    decoded: Callable[[Storage, torch.dtype], Tensor] = decode if impl is None else impl
    return lambda tensors: decoded(side.storage.from_tensors(tensors[:-1], side, shape, a.dtype), torch.bfloat16)


def bind_padded_ends(unit: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Bind a function that finds where each group ends along a contraction in which groups are padded to multiples of
    ``unit``."""
    if serves(NEEDS, device):
        return bind_pad_ends(unit, device)

    def padded_ends(offs: Tensor) -> Tensor:
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        return ((sizes + (unit - 1)) // unit * unit).cumsum(0, dtype=torch.int32)

    return padded_ends


def bind_of_groups(dtype: torch.dtype, device: torch.device) -> Finish:
    """Bind what turns products of groups into the result of a layer: zero for empty groups."""
    clear = bind_clear_matrices(device) if serves(NEEDS, device) else None

    def of_groups(product: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
        if clear is not None:
            clear(product, offs)
            return product.to(dtype)
        begins = torch.cat([offs.new_zeros(1), offs[:-1]])
        return torch.where((offs > begins)[:, None, None], product, product.new_zeros(())).to(dtype)

    return of_groups


def sum_rows(x: Tensor, offs: Tensor) -> Tensor:
    """Sum the rows of each group, by a product with ones. A sum with a value that is not finite is NaN."""
    row = torch.arange(len(x), device=offs.device)
    begins = torch.cat([offs.new_zeros(1), offs[:-1]])
    member = ((row >= begins[:, None]) & (row < offs[:, None])).to(x.dtype)
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    broken = member @ (x != finite).to(x.dtype)  # a product of what is not finite would reach every group
    return torch.where(broken > 0, torch.nan, member @ finite)
