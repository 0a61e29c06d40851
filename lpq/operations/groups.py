"""Rows in groups, each encoded by itself.

The references compute a group at a time, as separate layers do with separate tensors. They read the offsets on the
host; ``group_tiles`` has a GPU compute all groups at once. ``offs`` is where each group ends, int32, on the device of
the rows; its values grow, and rows behind the last one belong to no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.groups import Grouped, bounds, grid, piece, starts, unit
from lpq.formats.layout import as_bytes, row_major
from lpq.formats.sections import Sections
from lpq.kernels.table import kernels_allowed
from lpq.operations import group_tiles, sectioned
from lpq.operations.binding import Encoded, on_device
from lpq.operations.format_calls import encoded_by
from lpq.operations.offsets import read
from lpq.operations.operands import State, encode_operands, state_names
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.operations.sectioned import Pair, SectionsEncoding
from lpq.registry.errors import words
from lpq.registry.warning import warn

Run = Callable[[Tensor, State | None, Tensor | None, Tensor], Encoded]
"""``run(x, state, seeds, offs)``: the buffers of both operands; ``seeds`` has one for each group."""


def bind(e: SectionsEncoding) -> tuple[Pair, Run]:
    """Bind the encoding of rows into the wanted operands: the bytes of each group are those of its rows alone. An
    operand that is an ordinary matrix is a view or a cast of the rows."""
    quantizer = e.quantizer
    of_row, of_col = quantizer.side("row"), quantizer.side("col")
    plain = e.row and of_row.plain, e.col and of_col.plain and quantizer.col_source == "original"
    e = e._replace(row=e.row and not plain[0], col=e.col and not plain[1])
    decoded, run = _bind(e) if e.row or e.col else ((False, False), None)
    first = e.operand(0, decoded=decoded[0]) if e.row or plain[0] else None
    second = e.operand(1, decoded=decoded[1]) if e.col or plain[1] else None
    if run is not None and plain == (False, False):
        return (first, second), run

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        row, col, _ = run(x, state, seeds, offs) if run is not None else ((), (), ())
        if plain[0]:
            row = *encoded_by(of_row, x, {}, None).tensors(), offs
        if plain[1]:
            col = *encoded_by(of_col, x.t(), {}, None).tensors(), offs
        return row, col, ()

    return (first, second), encode


def _bind(e: SectionsEncoding) -> tuple[tuple[bool, bool], Run]:
    """Bind the encoding of operands that are no ordinary matrices, and tell which are made decoded."""
    row, col = e.quantizer.side("row") if e.row else None, e.quantizer.side("col") if e.col else None
    kernels = sectioned.bind_any(e, row, col) if True in e.decoded or not e.watched else None
    if kernels is not None and (True in kernels[1] or not e.watched):
        by_kernel, decoded = kernels

        def encode(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
            first, second, _ = by_kernel(x, offs, state, seeds)
            if row is not None:
                first.append(offs)
            if col is not None:
                second.append(offs)
            return first, second, ()

        return decoded, encode
    at = len(row.layout) if row is not None else 0
    many = _by_operator(e) if e.watched else _without_kernels(e)

    def encode_many(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        out = many(x, offs, seeds, state)
        return (*out[:at], offs) if e.row else (), (*out[at:], offs) if e.col else (), ()

    return (False, False), encode_many


def _by_operator(e: SectionsEncoding) -> Callable[[Tensor, Tensor, Tensor | None, State | None], Sequence[Tensor]]:
    quantizer, names = e.quantizer, state_names(e.quantizer)
    layouts = layout_hash(quantizer.side("row").text, quantizer.side("col").text)

    def encode(x: Tensor, offs: Tensor, seeds: Tensor | None, state: State | None) -> Sequence[Tensor]:
        values = [] if state is None else [state[name] for name in names]
        out: list[Tensor] = torch.ops.lpq.encode_groups(x, offs, quantizer.text, e.row, e.col, seeds, values, layouts)
        return out

    return encode


def _without_kernels(e: SectionsEncoding) -> Callable[[Tensor, Tensor, Tensor | None, State | None], Sequence[Tensor]]:
    quantizer, row, col = e.quantizer, e.row, e.col
    why = _why_not(quantizer, row, col) if e.sections.at_once else None

    def encode(x: Tensor, offs: Tensor, seeds: Tensor | None, state: State | None) -> Sequence[Tensor]:
        if e.sections.at_once and without_the_host(why):
            return group_tiles.encode(x, offs, quantizer, row, col, seeds, state)
        return encode_groups_reference(x, offs, quantizer, row, col, seeds, state)

    return encode


_bound = registry.cached_few(lambda e, kernels: bind(e))


def encode_groups(
    quantizer: Quantizer,
    x: Tensor,
    offs: Tensor,
    *,
    row: bool,
    col: bool,
    seeds: Tensor | None = None,
    state: State | None = None,
    dispatched: bool = False,
) -> tuple[Grouped | None, Grouped | None]:
    """Encode the rows ``x`` in groups; the arguments are as in ``SectionsEncoding`` and ``Run``."""
    rows, cols = x.shape
    e = SectionsEncoding(
        quantizer, row, col, (rows, cols), x.dtype, x.device, Sections(len(offs), False, at_once(x, offs)),
        state is not None, dispatched=dispatched, watched=not dispatched and not can_call_directly(x),
    )  # fmt: skip
    operands, run = bind(e) if e.watched else _bound(e, kernels_allowed())
    with on_device(x.device):
        made = run(x, state, seeds, offs)
    first, second = (None if o is None else o.grouped(tensors) for o, tensors in zip(operands, made, strict=False))
    return first, second


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
    made = encode_groups(of, x, offs, row=row, col=col, seeds=seeds, state=named, dispatched=True)
    return [row_major(t) for operand in made if operand is not None for t in operand.tensors]


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
