"""Rows in groups on a device, encoded and multiplied all at once: the host does not read the offsets. By contract, a
shard that is encoded with the statistics of the whole is a part of the encoded whole. So the rows are laid out in
*tiles*. Each tile belongs to one group and has the smallest number of rows that may be encoded as a shard. Tiles are
encoded as shards of their group, all by one run of the format's own code, and statistics are reduced over the tiles of
each group as they are over ranks. Where no statistic spans several tiles, the tiles are one matrix, which kernels
encode. Products multiply decoded operands in bf16. Rows of no group, and the matrices of empty groups, are set to zero
in the results: torch's grouped product leaves whatever lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Buffer, Covering, for_dtype
from lpq.formats.random_bits import RandomBits, bytes_at
from lpq.formats.sections import Grouped, capacity, matrices, unit
from lpq.kernels import choose
from lpq.kernels.sections import clear_matrices, clear_rows, pad_ends, there_are_kernels
from lpq.operations.binding import Operand, Product
from lpq.operations.decoding import decode
from lpq.operations.exact_form import Multiplicand
from lpq.operations.format_calls import encoded_by
from lpq.operations.measuring import measure_reference
from lpq.operations.quantizing import quantized
from lpq.operations.sides import shared
from lpq.operations.states import State, recall
from lpq.operations.vmapped import vmapped

ALIGNED = 8
"""torch's grouped product takes rows of multiples of 16 bytes, which is this number of bf16 elements."""


class Tiles(NamedTuple):
    """Where the rows of each tile lie. Behind those that hold rows come empty ones, one for each group."""

    group: Tensor
    """The group of each tile, ``[count]``; behind the last group, their number."""
    place: Tensor
    """Where in its group each begins, ``[count]``."""
    row: Tensor
    """The rows that it holds, ``[count, unit]``."""
    valid: Tensor
    """Whether there is such a row in its group, ``[count, unit]``."""
    begins: Tensor
    """Where each group begins among the rows, ``[groups]``; ``padded``: and in an operand."""
    padded: Tensor
    ends: Tensor


def tiles(offs: Tensor, rows: int, unit: int) -> Tiles:
    """Tiles of ``unit`` rows."""
    ends = offs.long()
    groups = len(ends)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    sizes = (ends - begins + unit - 1) // unit * unit
    last = sizes.cumsum(0)
    at = torch.arange(capacity(rows, groups, unit) // unit, device=offs.device) * unit
    group = torch.searchsorted(last, at, right=True)
    own = group.clamp(max=groups - 1)
    group, own = (torch.cat([of, torch.arange(groups, device=offs.device)]) for of in (group, own))
    place = torch.cat([at, last]) - (last - sizes)[own]
    place[len(at) :] = 0
    row = (begins[own] + place)[:, None] + torch.arange(unit, device=offs.device)
    valid = (row < ends[own][:, None]) & (group < groups)[:, None]
    valid[len(at) :] = False
    return Tiles(group, place, row, valid, begins, last - sizes, ends)


# ---------------------------------------------------------------------------------------------- encoding


def encode(
    x: Tensor, offs: Tensor, quantizer: Quantizer, row: bool, col: bool, seeds: Tensor | None,
    state: State | None = None,
) -> list[Tensor]:  # fmt: skip
    """The buffers of the wanted operands, the row operand's first; ``state``: static statistics of each group."""

    def known(of_row: Quantizer | None, of_col: Quantizer | None) -> Sequence[Tensor | None]:
        return () if state is None else recall(quantizer, of_row, of_col, state)

    out: list[Tensor] = []
    of_row, of_col = quantizer.side("row"), quantizer.side("col")
    if row:
        out += _side(of_row, x, offs, 0, seeds, known(of_row, None))
    if not col:
        return out
    if quantizer.col_source == "original":
        return out + _side(of_col, x, offs, 1, seeds, known(None, of_col), follows=row and shared(of_row, of_col))
    rows, cols = x.shape
    tensors = out if row else _side(of_row, x, offs, 0, seeds, known(of_row, None))
    decoded = dense(Grouped(of_row, tensors, (rows, cols), x.dtype, 0), offs, torch.float32, rotated=False)
    if of_col.plain:
        derived: Sequence[Tensor] = encoded_by(of_col, decoded.t(), {}, None).tensors()
    else:
        derived = _side(of_col, decoded, offs, 1, seeds, known(None, of_col))
    return out + for_dtype(of_col.layout, derived, x.dtype)


def _side(
    side: Quantizer, x: Tensor, offs: Tensor, dim: int, seeds: Tensor | None, known: Sequence[Tensor | None],
    follows: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The buffers of one operand; ``known``: the statistics of groups that are not measured. ``follows``: it is the
    transpose of the row operand, and so has its random bits."""
    t = tiles(offs, len(x), unit(side, dim))
    count = len(t.group) - len(offs)
    seeds = seeds if side.stochastic else None
    if seeds is None and not spans(side, dim):
        whole_rows = t.row.shape[1] == 1  # each row is a tile in place; rows of no group are not read
        flat = x if whole_rows else _gathered(x, t, count).flatten(0, 1)
        return [*(quantized(flat, None, side, None)[0] if dim == 0 else quantized(flat, None, None, side)[1])]
    given = _gathered(x, t, len(t.group))
    if dim == 1:
        given = given.transpose(1, 2)
    stats = vmapped(lambda m: measure_reference(m, side, None), given) if side.stats else []
    stats = [
        _of_groups(s, t.group, len(offs)) if d.block[dim] is None else s for s, d in zip(stats, side.stats, strict=True)
    ]
    own = t.group.clamp(max=len(offs) - 1)
    stats = [s if k is None else k[own] for s, k in zip(stats, known or [None] * len(stats), strict=True)]
    drawn = []
    if seeds is not None and follows:
        drawn = [_bits(seeds, t, 0, given.shape[:0:-1]).transpose(1, 2)]
    elif seeds is not None:
        drawn = [_bits(seeds, t, dim, given.shape[1:])]

    def one(m: Tensor, *rest: Tensor) -> list[Tensor]:
        named = dict(zip((s.name for s in side.stats), rest, strict=False))
        return encoded_by(side, m, named, _Drawn(rest[-1], dim) if drawn else None).tensors()

    made_of_tiles = vmapped(one, given, *stats, *drawn)
    return [_assembled(b, v, count, dim) for b, v in zip(side.layout, made_of_tiles, strict=True)]


def spans(side: Quantizer, dim: int) -> bool:
    """Whether a statistic or a buffer spans all rows of a group."""
    declared: list[Covering] = [*side.stats, *side.layout]
    return any(covering.block[dim] is None for covering in declared)


def _gathered(x: Tensor, t: Tiles, count: int) -> Tensor:
    """The rows of the first tiles, ``[count, unit, cols]``, zero where there is none."""
    row, valid = t.row[:count], t.valid[:count, :, None]
    if not len(x):
        return x.new_zeros((*row.shape, x.shape[1]))
    return torch.where(valid, x[row.clamp(max=len(x) - 1)], x.new_zeros(()))


def _of_groups(stat: Tensor, group: Tensor, groups: int) -> Tensor:
    """The largest of each group's tiles, for each tile. Non-negative floats order as their bits do, NaN above all."""
    bits = stat.contiguous().view(torch.int32)
    index = group.view(-1, *[1] * (bits.dim() - 1)).expand_as(bits)
    largest = bits.new_zeros((groups + 1, *bits.shape[1:])).scatter_reduce_(0, index, bits, "amax")
    return largest[group].view(torch.float32)


class _Drawn(RandomBits):
    """Random bits of a tile that are drawn already."""

    def __init__(self, drawn: Tensor, direction: int) -> None:
        super().__init__(drawn, direction)

    def bytes(self, rows: int, cols: int) -> Tensor:
        return self.seed[:rows, :cols]


def _bits(seeds: Tensor, t: Tiles, dim: int, shape: torch.Size) -> Tensor:
    """The random bits of all tiles, by the places of their elements in their groups."""
    of_tile = seeds[t.group.clamp(max=len(seeds) - 1)]
    row, col = (t.place, torch.zeros_like(t.place)) if dim == 0 else (torch.zeros_like(t.place), t.place)
    return bytes_at(of_tile, dim, (row, col), shape[0], shape[1])


def _assembled(buffer: Buffer, made: Tensor, count: int, dim: int) -> Tensor:
    """A buffer of the operand, of the buffers of its tiles."""
    if buffer.block == (None, None):
        return made[count:]
    if buffer.block[dim] is None:
        return made[count:].select(1 + dim, 0) if dim == 0 else made[count:].select(2, 0).transpose(0, 1).contiguous()
    whole = made[:count].flatten(0, 1) if dim == 0 else made[:count].movedim(0, 1).flatten(1, 2)
    return whole.contiguous()  # a kernel may leave tiles column by column, which the products do not take


# ---------------------------------------------------------------------------------------------- decoding


def dense(a: Grouped, offs: Tensor, dtype: torch.dtype, *, rotated: bool) -> Tensor:
    """The rows that an operand stands for, ``[rows, cols]``; rows of no group have arbitrary values. ``rotated``:
    columns of a row operand are left in the basis in which they are stored; in a column operand, rows are."""
    rows, side = a.shape[a.dim], a.quantizer
    if a.decoded and a.dim == 0:
        return a.tensors[0]
    if side.plain:
        values = a.tensors[0] if a.dim == 0 else a.tensors[0].t()
        return values.to(dtype).contiguous()
    if a.dim == 0 and unit(side, 0) == 1 and not spans(side, 0) and not rotated:  # each row where it lies
        return decode(side.storage.wrap(a.tensors, side, a.shape, a.dtype), dtype)
    t = tiles(offs, rows, unit(side, a.dim))
    values = _decoded(a, t, dtype, rotated)
    ends, index = t.ends, torch.arange(rows, device=offs.device)
    group = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    at = (t.padded[group] + index - t.begins[group]).clamp(max=max(len(values) - 1, 0))
    return values[at] if len(values) else values.new_zeros((rows, values.shape[1]))


def _decoded(a: Grouped, t: Tiles, dtype: torch.dtype, rotated: bool) -> Tensor:
    """The rows of all tiles one behind the other."""
    side, dim, count = a.quantizer, a.dim, len(t.group) - len(t.ends)
    size = t.row.shape[1]
    if not spans(side, dim) and not rotated:
        whole = (count * size, a.shape[1]) if dim == 0 else (a.shape[0], count * size)
        values = decode(side.storage.wrap(a.tensors, side, whole, a.dtype), dtype)
        return values if dim == 0 else values.t()
    shape = (size, a.shape[1]) if dim == 0 else (a.shape[0], size)
    own = t.group[:count].clamp(max=len(t.ends) - 1)
    buffers = [_of_tiles(b, v, own, count, dim) for b, v in zip(side.layout, a.tensors, strict=True)]

    def one(*each: Tensor) -> list[Tensor]:
        storage = side.storage.wrap(each, side, shape, a.dtype)
        return [(storage.decode_rotated() if rotated else storage.decode()).to(dtype)]

    (values,) = vmapped(one, *buffers)
    return values.flatten(0, 1) if dim == 0 else values.transpose(1, 2).flatten(0, 1)


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
    return torch.stack([matrix.decode_rotated().bfloat16() for matrix in matrices(stack)])


# ---------------------------------------------------------------------------------------------- multiplying


def why_not_multiplied(rows: int, cols: int) -> str | None:
    """Why torch's grouped product does not take matrices of these sizes; None if it does."""
    if rows % ALIGNED or cols % ALIGNED:
        return f"sizes {rows} and {cols} are no multiples of {ALIGNED}"
    return None


def multiply_rows(a: Grouped, b: Storage, offs: Tensor) -> Tensor:
    """Multiply the rows of each group by its matrix, in bf16; ordinary matrices in the dtype that they have in
    common."""
    if a.quantizer.plain and b.quantizer.plain:
        common = torch.promote_types(a.tensors[0].dtype, b.tensors()[0].dtype)
        left, right = dense(a, offs, common, rotated=False), decode(b, common)
    else:
        rotated = a.quantizer.basis == b.quantizer.basis and a.quantizer.basis is not None
        left, right = dense(a, offs, torch.bfloat16, rotated=rotated), _stack_in_bf16(b, rotated)
    return grouped_mm(left, right.transpose(-2, -1), offs=offs)


def in_rows(product: Tensor, offs: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A product as a layer returns it: with the bias, and with zeros behind the last group."""
    product = product.to(dtype)
    if bias is None and there_are_kernels(product.device):
        clear_rows(product, offs)
        return product
    row = torch.arange(len(product), device=offs.device)
    if bias is not None:
        group = torch.searchsorted(offs, row, right=True).clamp(max=len(offs) - 1)
        product = (product.float() + bias[group].float()).to(dtype)
    return torch.where((row < offs[-1])[:, None], product, product.new_zeros(()))


def multiply_columns(a: Grouped, b: Grouped, offs: Tensor) -> Tensor:
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
        return lambda left, right: grouped_mm(first(left), second(right).t(), offs=padded_ends(left[-1], step))
    if a.form is not None and b.form is not None:
        return lambda left, right: grouped_mm(left[0], right[0].transpose(-2, -1), offs=left[-1])
    return lambda left, right: multiply_rows(a.grouped(left), b.over(right), left[-1])


def _bind_lines(a: Operand, device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Bind the decoded values, in bf16, of a column operand in its own layout, ``[cols, padded rows]``; None if it is
    decoded group by group."""
    side, sections = a.quantizer, a.sections
    if a.form is not None:
        return itemgetter(0)
    if side.plain or spans(side, 1) or side.rotation is not None or sections is None:
        return None
    shape = a.shape[0], capacity(a.shape[1], sections.number, unit(side, 1))
    impl = choose("decode", (side.text,), device).impl
    decoded: Callable[[Storage, torch.dtype], Tensor] = decode if impl is None else impl
    return lambda tensors: decoded(side.storage.wrap(tensors[:-1], side, shape, a.dtype), torch.bfloat16)


def padded_ends(offs: Tensor, unit: int) -> Tensor:
    """Where each group ends along a contraction in which groups are padded to multiples of ``unit``."""
    if there_are_kernels(offs.device):
        return pad_ends(offs, unit)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return ((sizes + (unit - 1)) // unit * unit).cumsum(0, dtype=torch.int32)


def of_groups(product: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """The products of groups as a layer returns them: zero for empty ones."""
    if there_are_kernels(product.device):
        clear_matrices(product, offs)
        return product.to(dtype)
    begins = torch.cat([offs.new_zeros(1), offs[:-1]])
    return torch.where((offs > begins)[:, None, None], product, product.new_zeros(())).to(dtype)


def sum_rows(x: Tensor, offs: Tensor) -> Tensor:
    """Sum the rows of each group, by a product with ones."""
    row = torch.arange(len(x), device=offs.device)
    begins = torch.cat([offs.new_zeros(1), offs[:-1]])
    member = (row >= begins[:, None]) & (row < offs[:, None])
    inside = torch.where((row < offs[-1])[:, None], x, x.new_zeros(()))
    return member.to(x.dtype) @ inside
