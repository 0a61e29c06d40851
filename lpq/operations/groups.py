"""Rows in groups, each encoded by itself.

The references compute a group at a time, as separate layers do with separate tensors. They read the offsets on the
host; ``group_tiles`` has a GPU compute all groups at once. ``offs`` is where each group ends, int32, on the device of
the rows; its values grow, and rows behind the last one belong to no group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.groups import Grouped, bounds, grid, piece, starts, unit
from lpq.formats.layout import as_bytes, row_major
from lpq.operations import group_tiles, sectioned
from lpq.operations.decoding import decode
from lpq.operations.format_calls import encoded_by
from lpq.operations.offsets import read
from lpq.operations.operands import State, encode_operands, state_names
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.registry.errors import words
from lpq.registry.warning import warn

# ---------------------------------------------------------------------------------------------- encoding


def encode_groups(
    quantizer: Quantizer,
    x: Tensor,
    offs: Tensor,
    *,
    row: bool,
    col: bool,
    seeds: Tensor | None = None,
    decoded: tuple[bool, bool] = (False, False),
    state: State | None = None,
) -> tuple[Grouped | None, Grouped | None]:
    """Encode the rows ``x`` in groups into the wanted operands: the bytes of each group are those of its rows alone.
    ``seeds`` has one for each group. An operand that is an ordinary matrix is a view or a cast of ``x``. ``decoded``:
    whether only the decoded values of the row operand, and of the column operand, are wanted (``decoded_at_once``).
    ``state``: the static statistics, with one for each group along their first dimension."""
    of_row, of_col = quantizer.side("row"), quantizer.side("col")
    (rows, cols), from_x = x.shape, quantizer.col_source == "original"
    first = _plain(of_row, x, 0) if row and of_row.plain else None
    second = _plain(of_col, x, 1) if col and of_col.plain and from_x else None
    row, col = row and first is None, col and second is None
    if not row and not col:
        return first, second
    decoded = decoded[0] and row, decoded[1] and col
    if True in decoded and from_x:
        sides = of_row if row else None, of_col if col else None
        given = sectioned.given_of(quantizer, *sides, state)
        if (made := sectioned.encode(x, offs, *sides, seeds, decoded, given)) is not None:
            return (
                Grouped(of_row, made[0], (rows, cols), x.dtype, 0, decoded[0]) if row else first,
                Grouped(of_col, made[1], (cols, rows), x.dtype, 1, decoded[1]) if col else second,
            )
    if can_call_directly(x):
        out = _encoded(x, offs, quantizer, row, col, seeds, state)
    else:
        layouts = layout_hash(of_row.text, of_col.text)
        values = [] if state is None else [state[name] for name in state_names(quantizer)]
        out = torch.ops.lpq.encode_groups(x, offs, quantizer.text, row, col, seeds, values, layouts)
    at = len(of_row.layout) if row else 0
    if row:
        first = Grouped(of_row, out[:at], (rows, cols), x.dtype, 0)
    if col:
        second = Grouped(of_col, out[at:], (cols, rows), x.dtype, 1)
    return first, second


def derive_columns(quantizer: Quantizer, row: Grouped, offs: Tensor, seeds: Tensor | None) -> Grouped:
    """Make the column operand of rows that have only a row operand (``why_not_row_by_row``)."""
    values = decode(row.quantizer.storage.wrap(row.tensors, row.quantizer, row.shape, row.dtype), torch.float32)
    _, col = encode_groups(quantizer.side("col"), values, offs, row=False, col=True, seeds=seeds)
    assert col is not None
    pairs = zip(col.quantizer.layout, col.tensors, strict=True)
    tensors = [t.to(row.dtype) if b.dtype is None else t for b, t in pairs]
    return col._replace(tensors=tensors, dtype=row.dtype)  # it stands for the rows, not for what was decoded


def _plain(side: Quantizer, x: Tensor, dim: int) -> Grouped:
    made = encoded_by(side, x if dim == 0 else x.t(), {}, None)
    rows, cols = made.shape
    return Grouped(side, made.tensors(), (rows, cols), x.dtype, dim)


def encode_groups_reference(
    x: Tensor, offs: Tensor, quantizer: Quantizer, row: bool, col: bool, seeds: Tensor | None,
    state: State | None = None,
) -> list[Tensor]:  # fmt: skip
    """The buffers of the wanted operands, the row operand's first, made group by group."""
    rows, cols = x.shape
    sides = [(quantizer.side("row"), 0, (rows, cols))] if row else []
    sides += [(quantizer.side("col"), 1, (cols, rows))] if col else []
    ends, out = read(offs, rows), _empty(x, len(offs), quantizer, row, col)
    for tensor in out:
        tensor.zero_()
    begins = [starts(ends, unit(side, dim)) for side, dim, _ in sides]
    for group, (start, stop) in enumerate(bounds(ends)):
        seed = None if seeds is None else seeds[group]
        own = None if state is None else {name: values[group] for name, values in state.items()}
        made = encode_operands(quantizer, x[start:stop], row=row, col=col, seed=seed, state=own)
        rest = iter(out)
        for (side, dim, _), at in zip(sides, begins, strict=True):
            operand = made.row if dim == 0 else made.col
            assert operand is not None
            high, wide = operand.shape
            for buffer, tensor in zip(side.layout, operand.tensors(), strict=True):
                piece(buffer, next(rest), group, at[group], high, wide, dim).copy_(tensor)
    return out


def _empty(x: Tensor, groups: int, quantizer: Quantizer, row: bool, col: bool) -> list[Tensor]:
    rows, cols = x.shape
    out: list[Tensor] = []
    for wanted, side, dim, shape in (
        (row, quantizer.side("row"), 0, (rows, cols)),
        (col, quantizer.side("col"), 1, (cols, rows)),
    ):
        for buffer in side.layout if wanted else ():
            size = grid(buffer, *shape, groups, dim, unit(side, dim))
            out.append(x.new_empty(size, dtype=buffer.dtype or x.dtype))
    return out


def _encoded(
    x: Tensor,
    offs: Tensor,
    quantizer: Quantizer,
    row: bool,
    col: bool,
    seeds: Tensor | None,
    state: State | None = None,
    *,
    dispatched: bool = False,
) -> list[Tensor]:
    if at_once(x, offs):
        if quantizer.col_source == "original":
            sides = quantizer.side("row") if row else None, quantizer.side("col") if col else None
            given = sectioned.given_of(quantizer, *sides, state)
            made = sectioned.encode(x, offs, *sides, seeds, given=given, dispatched=dispatched)
            if made is not None:
                return [*made[0], *made[1]]
        if without_the_host(_why_not(quantizer, row, col)):
            return group_tiles.encode(x, offs, quantizer, row, col, seeds, state)
    return encode_groups_reference(x, offs, quantizer, row, col, seeds, state)


def at_once(x: Tensor, offs: Tensor) -> bool:
    """Whether all groups are computed at once, without waiting for the offsets. In tests a CPU does so, too."""
    return x.is_cuda and len(offs) > 0


def _why_not(quantizer: Quantizer, row: bool, col: bool) -> str | None:
    """Why groups cannot be encoded at once; None if they can."""
    why = _why_no_tiles(quantizer.side("row").text, 0) if row or quantizer.col_source == "row" else None
    return _why_no_tiles(quantizer.side("col").text, 1) if why is None and col else why


@registry.cached
def _why_no_tiles(text: str, dim: int) -> str | None:
    """The same for one operand. One comparison on a CPU decides: ``torch.vmap`` may not run the format, or the format
    may give a ragged edge other bytes than one that is padded with zeros."""
    side: Quantizer = registry.quantizer(text)
    if side.plain:
        return None
    if (why := side.why_no_parts(dim)) is not None:
        return why
    if group_tiles.spans(side, dim) and any(stat.reduce != "max" or stat.round > 1 for stat in side.stats):
        return f"{side} counts, or measures a second time, and that is not done for groups at once"
    x = torch.randn(29, 40, generator=torch.Generator().manual_seed(0))
    offs, seeds = torch.tensor([5, 5, 26], dtype=torch.int32), torch.arange(3)
    row, col = dim == 0, dim == 1
    try:
        found = group_tiles.encode(x, offs, side, row, col, seeds)
    except Exception as error:
        return f"torch.vmap cannot run what {side} does: {words(error)}"
    wanted, shape = encode_groups_reference(x, offs, side, row, col, seeds), (29, 40) if row else (40, 29)
    both = [Grouped(side, tensors, shape, x.dtype, dim) for tensors in (found, wanted)]
    begins = starts(offs.tolist(), unit(side, dim))
    for group, (start, stop) in enumerate(bounds(offs.tolist())):
        first, second = (g.matrix(group, start, stop, begins[group]).tensors() for g in both)
        if any(not torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(first, second, strict=True)):
            return f"{side} gives rows that are padded with zeros other bytes"
    return None


def without_the_host(why_not: str | None) -> bool:
    """Whether a device computes all groups by itself. If not, the host reads the offsets, and a warning gives the
    reason."""
    if why_not is not None:
        warn(f"a group at a time, for which the host waits for the device: {why_not}")
    return why_not is None


def _encode(
    x: Tensor, offs: Tensor, quantizer: str, row: bool, col: bool, seeds: Tensor | None, state: list[Tensor],
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    of: Quantizer = registry.quantizer(quantizer)
    named = dict(zip(state_names(of), state, strict=True)) if state else None
    made = _encoded(x, offs, of, row, col, seeds, named, dispatched=True)
    return [row_major(t) for t in made]


def _encode_fake(
    x: Tensor, offs: Tensor, quantizer: str, row: bool, col: bool, seeds: Tensor | None, state: list[Tensor],
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    return _empty(x, offs.shape[0], registry.quantizer(quantizer), row, col)


define(
    "encode_groups(Tensor x, Tensor offs, str quantizer, bool row, bool col, Tensor? seeds, "
    'Tensor[] state, str layouts="") -> Tensor[]',
    _encode,
    _encode_fake,
)
