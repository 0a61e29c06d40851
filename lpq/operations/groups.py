"""Encoding of tensors in sections, which are groups of rows or stacks of matrices; each section is encoded by itself.

The references compute a group at a time, as separate layers do with separate tensors. They read the offsets on the
host; ``group_tiles`` has a GPU compute all groups at once. ``offs`` is where each group ends, int32, on the device of
the rows; its values grow, and rows behind the last one belong to no group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.layout import as_bytes, row_major
from lpq.formats.sections import Grouped, Sections, bounds, grid, piece, starts, unit
from lpq.kernels.table import kernels_allowed
from lpq.operations import group_tiles, sectioned
from lpq.operations.binding import Encoded, Encoding, on_device
from lpq.operations.encoder import Encoder, Known, Wanted, operands_of, sides_of
from lpq.operations.encoder import through_operators as each_matrix
from lpq.operations.offsets import read
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.operations.quantizing import quantized
from lpq.operations.states import State, state_names
from lpq.registry.errors import words
from lpq.registry.warning import warn

Encode = Callable[..., Encoded]
"""``encode(x, known, seeds, *offs)``, as an ``Encoder`` of sections does it: ``seeds`` has one for each section, and
``known`` is a state with static statistics of each, or amaxes that were found before. Those are measured again where no
kernel takes them."""


def bind(wanted: Wanted, *, watched: bool = False, dispatched: bool = False) -> Encoder:
    """Bind the encoding of sections into the wanted operands: each section has the bytes that it has when encoded
    alone. An operand that is an ordinary matrix is a view or a cast. ``watched``: operators encode, for a tracer or a
    mode. ``dispatched``: as in ``Encoding``."""
    sides = sides_of(wanted)
    plain_row, plain_col = (side if side is not None and side.plain else None for side in sides)
    if wanted.quantizer.col_source == "row":
        plain_col = None
    rest = wanted._replace(row=wanted.row and plain_row is None, col=wanted.col and plain_col is None)
    exact, run = _bind(rest, watched, dispatched) if rest.row or rest.col else ((False, False), None)
    operands = operands_of(wanted, (sectioned.DECODED if exact[0] else None, sectioned.DECODED if exact[1] else None))
    if run is not None and plain_row is None and plain_col is None:
        return Encoder(*operands, run)

    def encode(x: Tensor, known: Known, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        row, col, found = run(x, known, seeds, *offs) if run is not None else ((), (), ())
        of_row, of_col, _ = quantized(x, None, plain_row, plain_col)
        return row if plain_row is None else (*of_row, *offs), col if plain_col is None else (*of_col, *offs), found

    return Encoder(*operands, encode)


through_operators = partial(bind, watched=True)
_bind_few = registry.cached_few(lambda wanted, kernels, dispatched: bind(wanted, dispatched=dispatched))


def bind_encoder(wanted: Wanted) -> Encoder:
    """``bind``, once for all stacks of one shape: steps of experts differ in their numbers of rows alone."""
    assert wanted.sections is not None
    return _bind_few(wanted, kernels_allowed(), False) if wanted.sections.stack else bind(wanted)


def _bind(wanted: Wanted, watched: bool, dispatched: bool) -> tuple[tuple[bool, bool], Encode]:
    """Bind the encoding of operands that are no ordinary matrices, and tell which are made decoded."""
    (row, col), (rows, cols), sections = sides_of(wanted), wanted.shape, wanted.sections
    assert sections is not None
    stack = sections.stack
    alone = wanted._replace(given=(), measures=False, exact=(False, False))
    by_itself = each_matrix(alone).encode if stack else _of_groups(wanted, watched)
    if watched and (stack or True not in wanted.exact):
        return (False, False), by_itself
    e = Encoding(
        row, col, (rows * sections.number if stack else rows, cols), wanted.dtype, wanted.dtype, wanted.device,
        (wanted.row, wanted.col) if wanted.given else (), wanted.measures, exact=wanted.exact, dispatched=dispatched,
        sections=sections,
    )  # fmt: skip
    kernels = sectioned.bind_any(wanted.quantizer, e, wanted.remembers)
    if kernels is None or (watched and True not in kernels[1]):
        return (False, False), by_itself
    run, exact = kernels

    def encode(x: Tensor, known: Known, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        if wanted.given and not known:
            return by_itself(x, None, seeds, *offs)
        of_row, of_col, found = run(x, offs[0] if offs else None, known, seeds)
        if row is not None:
            of_row += offs
        if col is not None:
            of_col += offs
        return of_row, of_col, (found[0],) if wanted.measures and found[0] is not None else ()

    return exact, encode


def _of_groups(wanted: Wanted, watched: bool) -> Encode:
    quantizer, row, col, sections = wanted.quantizer, wanted.row, wanted.col, wanted.sections
    at = len(quantizer.side("row").layout) if row else 0
    at_once = not watched and sections is not None and sections.at_once
    why = _why_not(quantizer, row, col) if at_once else None
    names, layouts = state_names(quantizer), layout_hash(quantizer.side("row").text, quantizer.side("col").text)

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        if watched:
            values = [] if state is None else [state[name] for name in names]
            out = torch.ops.lpq.encode_groups(x, offs, quantizer.text, row, col, seeds, values, layouts)
        else:
            encodes = group_tiles.encode if at_once and without_the_host(why) else encode_groups_reference
            out = encodes(x, offs, quantizer, row, col, seeds, state)
        return (*out[:at], offs) if row else (), (*out[at:], offs) if col else (), ()

    return encode


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
    """Encode the rows ``x`` in groups; ``seeds`` and ``state`` are as in ``Encode``."""
    rows, cols = x.shape
    sections = Sections(len(offs), False, at_once(x, offs))
    wanted = Wanted(quantizer, (rows, cols), x.dtype, x.device, row, col, state is not None, sections=sections)
    watched = not dispatched and not can_call_directly(x)
    encoder = through_operators(wanted) if watched else _bind_few(wanted, kernels_allowed(), dispatched)
    with on_device(x.device):
        of_row, of_col, _ = encoder.encode(x, state, seeds, offs)
    first, second = encoder.row, encoder.col
    return None if first is None else first.grouped(of_row), None if second is None else second.grouped(of_col)


_of_each_group = registry.cached_few(each_matrix)


def encode_groups_reference(
    x: Tensor, offs: Tensor, quantizer: Quantizer, row: bool, col: bool, seeds: Tensor | None,
    state: State | None = None,
) -> list[Tensor]:  # fmt: skip
    """The buffers of the wanted operands, the row operand's first, made group by group."""
    rows, cols = x.shape
    wanted = Wanted(quantizer, (rows, cols), x.dtype, x.device, row, col, state is not None)
    ends, out, encoder = read(offs, rows), _empty(x, len(offs), quantizer, row, col), _of_each_group(wanted)
    for tensor in out:
        tensor.zero_()
    sides = [
        (side, dim, starts(ends, unit(side, dim))) for dim, side in enumerate(sides_of(wanted)) if side is not None
    ]
    for group, (start, stop) in enumerate(bounds(ends)):
        seed, high = None if seeds is None else seeds[group], stop - start
        own = None if state is None else {name: values[group] for name, values in state.items()}
        if quantizer.col_source == "row":  # then it has to know the size
            encoder = _of_each_group(wanted._replace(shape=(high, cols)))
        made, rest = encoder.encode(x[start:stop], own, seed), iter(out)
        for side, dim, begins in sides:
            shape = (high, cols) if dim == 0 else (cols, high)
            for buffer, tensor in zip(side.layout, made[dim], strict=True):
                piece(buffer, next(rest), group, begins[group], *shape, dim).copy_(tensor)
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
    """As ``_why_not``, for one operand. One comparison on a CPU decides: ``torch.vmap`` may not run the format, or the
    format may give a ragged edge other bytes than rows that are padded with zeros."""
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
