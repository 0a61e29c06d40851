"""Encoding of tensors in sections, which are groups of rows or stacks of matrices; each section is encoded by itself.

The reference computes a group at a time, as separate layers do with separate tensors. It reads the offsets on the
host; kernels (``sectioned``) encode all groups at once. ``offs`` is where each group ends, int32, on the device of the
rows; its values grow, and rows behind the last one belong to no group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.layout import row_major
from lpq.formats.sections import Sections, bounds, grid, piece, starts, unit
from lpq.kernels.table import bound_once
from lpq.operations import sectioned
from lpq.operations.binding import Encoded, Encoding, Operand, on_device
from lpq.operations.encoder import (
    Encoder,
    EncoderSpec,
    Stats,
    first_of,
    is_made_of_row,
    made_of_row,
    operands_of,
    second_of,
    sides_of,
)
from lpq.operations.encoder import through_operators as each_matrix
from lpq.operations.offsets import read
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.operations.quantizing import quantized
from lpq.operations.states import State, state_names
from lpq.registry.warning import warn

Encode = Callable[..., Encoded]
"""``encode(x, known, seeds, *offs)``, as an ``Encoder`` of sections does it: ``seeds`` has one for each section, and
``known`` is a state with static statistics of each, or amaxes that were found before: measured again
where no kernel takes them."""


def bind(spec: EncoderSpec, *, watched: bool = False, dispatched: bool = False) -> Encoder:
    """Bind the encoding of sections into the wanted operands: each section has the bytes that it has when encoded
    alone. An operand that is an ordinary matrix is a view or a cast. ``watched``: operators encode, for a tracer or a
    mode. ``dispatched``: as in ``Encoding``."""
    sections, follows = spec.sections, is_made_of_row(spec)
    if follows and sections is not None and sections.at_once and (spec.exact[1] or not watched):
        first, second = (bind(of(spec), watched=watched, dispatched=dispatched) for of in (first_of, second_of))
        return made_of_row(first, second, spec)
    plain_row, plain_col = (side if side is not None and side.plain else None for side in sides_of(spec))
    if follows:
        plain_col = None
    rest = spec._replace(row=spec.row and plain_row is None, col=spec.col and plain_col is None)
    exact, run = _bind(rest, watched, dispatched) if rest.row or rest.col else ((False, False), None)
    operands = operands_of(spec, (sectioned.DECODED if exact[0] else None, sectioned.DECODED if exact[1] else None))
    if run is not None and plain_row is None and plain_col is None:
        return Encoder(*operands, run)

    def encode(x: Tensor, statistics: Stats, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        row, col, stats = run(x, statistics, seeds, *offs) if run is not None else ((), (), ())
        of_row, of_col, _ = quantized(x, None, plain_row, plain_col)
        return row if plain_row is None else (*of_row, *offs), col if plain_col is None else (*of_col, *offs), stats

    return Encoder(*operands, encode)


through_operators = partial(bind, watched=True)
_bind_few = bound_once(lambda spec, dispatched=False: bind(spec, dispatched=dispatched))


def bind_encoder(spec: EncoderSpec) -> Encoder:
    """``bind``, once for all stacks of one shape: steps of experts differ in their numbers of rows alone."""
    assert spec.sections is not None
    return _bind_few(spec) if spec.sections.stack else bind(spec)


def _bind(spec: EncoderSpec, watched: bool, dispatched: bool) -> tuple[tuple[bool, bool], Encode]:
    """Bind the encoding of operands that are no ordinary matrices, and tell which are made decoded."""
    (row, col), (rows, cols), sections = sides_of(spec), spec.shape, spec.sections
    assert sections is not None
    stack = sections.stack
    alone = spec._replace(given=(), measures=False, exact=(False, False))
    by_itself = each_matrix(alone).encode if stack else _of_groups(spec, watched)
    if watched and (stack or True not in spec.exact):
        return (False, False), by_itself
    e = Encoding(
        row, col, (rows * sections.number if stack else rows, cols), spec.dtype, spec.dtype, spec.device,
        (spec.row, spec.col) if spec.given else (), spec.measures, exact=spec.exact, dispatched=dispatched,
        sections=sections,
    )  # fmt: skip
    kernels = None if is_made_of_row(spec) else sectioned.bind_any(spec.quantizer, e, spec.remembers)
    if kernels is None or (watched and True not in kernels[1]):
        return (False, False), by_itself
    run, exact = kernels

    def encode(x: Tensor, amaxes: Stats, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        return run(x, amaxes, seeds, *offs) if amaxes else by_itself(x, (), seeds, *offs)

    return exact, encode if spec.given else run


def _of_groups(spec: EncoderSpec, watched: bool) -> Encode:
    """Encode a group at a time, or by the operator that encodes groups."""
    quantizer, row, col, sections = spec.quantizer, spec.row, spec.col, spec.sections
    at = len(quantizer.side("row").layout) if row else 0
    why = None
    if sections is not None and sections.at_once and not watched:
        sides = dict.fromkeys(str(side) for side in sides_of(spec) if side is not None)
        why = f"no kernel encodes groups as {' and '.join(sides)}"
    names, layouts = state_names(quantizer), layout_hash(quantizer.side("row").text, quantizer.side("col").text)

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        if watched:
            values = [state[name] for name in names] if state else []
            out = torch.ops.lpq.encode_groups(x, offs, quantizer.text, row, col, seeds, values, layouts)
        else:
            if why is not None:
                tell_of_waiting(why)
            out = encode_groups_reference(x, offs, spec, seeds, state)
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
) -> tuple[Operand | None, Operand | None]:
    """Encode the rows ``x`` in groups; ``seeds`` and ``state`` are as in ``Encode``."""
    rows, cols = x.shape
    sections = Sections(len(offs), False, at_once(x, offs))
    spec = EncoderSpec(quantizer, (rows, cols), x.dtype, x.device, row, col, state is not None, sections=sections)
    watched = not dispatched and not can_call_directly(x)
    encoder = through_operators(spec) if watched else _bind_few(spec, dispatched=dispatched)
    with on_device(x.device):
        of_row, of_col, _ = encoder.encode(x, state or (), seeds, offs)
    first, second = encoder.row, encoder.col
    return None if first is None else first.grouped(of_row), None if second is None else second.grouped(of_col)


_of_each_group = registry.cached_few(each_matrix)


def encode_groups_reference(
    x: Tensor, offs: Tensor, spec: EncoderSpec, seeds: Tensor | None, state: State | None = None
) -> list[Tensor]:
    """The buffers of the wanted operands, the row operand's first, made group by group."""
    (rows, cols), remembers, knows_size = spec.shape, bool(state), is_made_of_row(spec)
    spec = spec._replace(sections=None, remembers=remembers, given=(), measures=False, exact=(False, False))
    ends, out, encoder = read(offs, rows), _empty(x, len(offs), spec), _of_each_group(spec)
    for tensor in out:
        tensor.zero_()
    sides = [(side, dim, starts(ends, unit(side, dim))) for dim, side in enumerate(sides_of(spec)) if side is not None]
    for group, (start, stop) in enumerate(bounds(ends)):
        seed, high = None if seeds is None else seeds[group], stop - start
        own = {name: values[group] for name, values in state.items()} if state else ()
        if knows_size:
            encoder = _of_each_group(spec._replace(shape=(high, cols)))
        buffers, rest = encoder.encode(x[start:stop], own, seed), iter(out)
        for side, dim, begins in sides:
            shape = (high, cols) if dim == 0 else (cols, high)
            for buffer, tensor in zip(side.layout, buffers[dim], strict=True):
                piece(buffer, next(rest), group, begins[group], *shape, dim).copy_(tensor)
    return out


def _empty(x: Tensor, groups: int, spec: EncoderSpec) -> list[Tensor]:
    rows, cols = spec.shape
    out: list[Tensor] = []
    for dim, side in enumerate(sides_of(spec)):
        if side is None:
            continue
        shape, step = (rows, cols) if dim == 0 else (cols, rows), unit(side, dim)
        for buffer in side.layout:
            size = grid(buffer, *shape, groups, dim, step)
            out.append(x.new_empty(size, dtype=buffer.dtype or x.dtype))
    return out


def at_once(x: Tensor, offs: Tensor) -> bool:
    """Whether all groups are computed at once, without waiting for the offsets. In tests a CPU does so, too."""
    return x.is_cuda and len(offs) > 0


def tell_of_waiting(why: str) -> None:
    """Warn that the host reads the offsets, where a device might compute all groups by itself."""
    warn(f"a group at a time, for which the host waits for the device: {why}")


def _encode(
    x: Tensor, offs: Tensor, quantizer: str, row: bool, col: bool, seeds: Tensor | None, state: list[Tensor],
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    of: Quantizer = registry.quantizer(quantizer)
    named = dict(zip(state_names(of), state, strict=True)) if state else None
    operands = encode_groups(of, x, offs, row=row, col=col, seeds=seeds, state=named, dispatched=True)
    return [row_major(t) for operand in operands if operand is not None for t in operand.tensors]


def _encode_fake(
    x: Tensor, offs: Tensor, quantizer: str, row: bool, col: bool, seeds: Tensor | None, state: list[Tensor],
    layouts: str = "",
) -> list[Tensor]:  # fmt: skip
    rows, cols = x.shape
    spec = EncoderSpec(registry.quantizer(quantizer), (rows, cols), x.dtype, x.device, row, col)
    return _empty(x, offs.shape[0], spec)


define(
    "encode_groups(Tensor x, Tensor offs, str quantizer, bool row, bool col, Tensor? seeds, "
    'Tensor[] state, str layouts="") -> Tensor[]',
    _encode,
    _encode_fake,
)
