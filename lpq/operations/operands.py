"""Encoding a tensor: measure → reduce → encode, for both directions at once.

This is the one place where statistics meet a process group, state meets a step and random bits meet an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.kernels import choose
from lpq.operations import fused_pair
from lpq.operations.decoding import decode
from lpq.operations.format_calls import Made, recalling
from lpq.operations.measuring import measure, measure_again
from lpq.operations.operators import ORDINARY, can_call_directly
from lpq.operations.quantizing import quantize
from lpq.operations.reduce_statistics import check_shard, reduce_stats, spans
from lpq.operations.sides import declared, measures_again

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lpq.formats.format import Quantizer

State = Mapping[str, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Operands(NamedTuple):
    """The wanted operands of one tensor, and, if they are wanted, the statistics that were measured on the way."""

    row: Storage | None
    col: Storage | None
    measured: list[Tensor]


def encode_operands(
    quantizer: Quantizer,
    x: Tensor,
    *,
    row: bool = True,
    col: bool = True,
    group: ProcessGroup | None = None,
    state: State | None = None,
    seed: Tensor | None = None,
    offset: int = 0,
    exact: tuple[bool, bool] = (False, False),
) -> Operands:
    """Encode the matrix ``x``. The state is read, never written: see ``remember``. Buffers lie in memory as encoding
    leaves them, which may be column by column: ``Storage.row_major`` is for what is kept.

    ``exact``: whether the row operand, and the column operand, is multiplied in bf16 at once and not kept. Such an
    operand may be made in its exact form in place of being encoded.
    """
    check_input(x)
    row_side = quantizer.side("row") if row else None
    col_side = quantizer.side("col") if col else None
    measured = state is not None and moves(quantizer, row_side, col_side)
    if quantizer.col_source == "original" or col_side is None:
        if group is None and state is None:  # nothing to reduce, and nothing to recall
            if (exact[0] or exact[1]) and row_side is not None and col_side is not None:
                made = fused_pair.multiplicands(x, row_side, col_side, seed, exact)
                if made is not None:
                    return Operands(*made, [])
            return Operands(*quantize(x, None, row_side, col_side, seed, offset))
        return _encode(quantizer, x, row_side, col_side, group, state, seed, offset, measured)
    first = _encode(quantizer, x, quantizer.side("row"), None, group, state, seed, offset, measured)
    assert first.row is not None
    decoded = decode(first.row, torch.float32)
    second = _encode(quantizer, decoded, None, col_side, group, state, seed, offset, measured)
    assert second.col is not None
    col_operand = second.col.astype(x.dtype)  # it stands for x, not for what was decoded
    if not row:
        return Operands(None, col_operand, second.measured)
    return Operands(first.row, col_operand, first.measured + second.measured)


def _encode(
    quantizer: Quantizer,
    x: Tensor,
    row: Quantizer | None,
    col: Quantizer | None,
    group: ProcessGroup | None,
    state: State | None,
    seed: Tensor | None,
    offset: int,
    measured: bool,
) -> Operands:
    known = recall(quantizer, row, col, state) if state is not None else []
    if group is not None and group.size() > 1:
        needed = declared(row, col)
        check_shard(row, col, x.shape[0])
        if state is None or any(k is None and spans(d) for k, d in zip(known, needed, strict=True)):
            stats = measure(x, row, col)
            reduce_stats([(needed, stats)], group)
            if measures_again(row, col):
                stats = measure_again(x, row, col, stats)
                reduce_stats([(needed, stats)], group, 2)
            use = [s if k is None else k for k, s in zip(known or [None] * len(stats), stats, strict=True)]
            row_operand, col_operand, _ = quantize(x, use, row, col, seed, offset)
            return Operands(row_operand, col_operand, stats)
    return Operands._make(quantize(x, known, row, col, seed, offset, measure=measured))


def _branches(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> list[tuple[str, Quantizer]]:
    """The state prefix and the quantizer of each set of statistics that encoding these directions measures."""
    state = quantizer.state_branches()
    if "" in state:
        return [("", state[""])]
    wanted = (("row_", row), ("col_", col))
    return [(prefix, branch) for prefix, branch in wanted if branch is not None]


def recall(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None, state: State) -> list[Tensor | None]:
    """The statistics to encode with, from the state; None where a direction remembers nothing."""
    return bind_recall(quantizer, row, col, lambda x, stats, seed: stats)(None, state, None)


def bind_recall(
    quantizer: Quantizer,
    row: Quantizer | None,
    col: Quantizer | None,
    run: Callable[[Any, list[Tensor | None], Any], Made],
) -> Callable[[Any, State, Any], Made]:
    """Return ``run``, which encodes these operands by given statistics, as a function of a state."""
    branches = [
        (branch, [(s.name, prefix + s.name) for s in branch.state]) for prefix, branch in _branches(quantizer, row, col)
    ]
    return recalling(branches, run)


def state_names(quantizer: Quantizer) -> list[str]:
    """The names of the statistics in a state, in order."""
    return [prefix + s.name for prefix, branch in quantizer.state_branches().items() for s in branch.state]


def recalls(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> tuple[bool, ...]:
    """For each statistic whether ``recall`` gives it."""
    return tuple(branch.recalls(stat) for _, branch in _branches(quantizer, row, col) for stat in branch.stats)


def moves(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether encoding these directions measures what ``remember`` takes into the state."""
    return any(branch.moves for _, branch in _branches(quantizer, row, col))


def remember(
    quantizer: Quantizer,
    state: State,
    measured: list[Tensor],
    *,
    row: bool = True,
    col: bool = True,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce the statistics that ``encode_operands`` measured in these directions and take them into the state."""
    sides = (quantizer.side("row") if row else None, quantizer.side("col") if col else None)
    if group is not None and moves(quantizer, *sides):
        apart = quantizer.col_source == "row"  # then equal sides have statistics of their own, too
        along = declared(sides[0], None) + declared(None, sides[1]) if apart else declared(*sides)
        reduce_stats([(along, measured)], group)
    rest = iter(measured)
    for prefix, branch in _branches(quantizer, *sides):
        stats = list(islice(rest, len(branch.stats)))  # none of a column operand that was derived elsewhere
        if branch.state and not branch.static:  # it moves, with fewer calls: this is in every step
            named = {s.name: values for s, values in zip(branch.stats, stats, strict=True)}
            _remember(branch, {s.name: state[prefix + s.name] for s in branch.state}, named)


class Moving(NamedTuple):
    """A tensor of a layer whose quantizer remembers, and the operands for which statistics of it were measured."""

    tensor: str
    """Its name."""
    quantizer: Quantizer
    row: bool
    col: bool


def bind_remember(
    wanted: Sequence[Moving], device: torch.device
) -> Callable[[Mapping[str, State], Mapping[str, Sequence[Tensor]]], None]:
    """``remember`` for several tensors of one layer, without a group, where the dispatcher may be bypassed: of states
    and measured statistics by the tensors' names. Kernels that bind take all that are theirs at once."""
    parts: list[tuple[str, Quantizer, list[tuple[str, str]], slice]] = []
    for tensor, quantizer, row, col in wanted:
        at = 0
        for prefix, branch in _branches(
            quantizer, quantizer.side("row") if row else None, quantizer.side("col") if col else None
        ):
            measured = slice(at, at + len(branch.stats))
            at = measured.stop
            if branch.state and not branch.static:
                parts.append((tensor, branch, [(s.name, prefix + s.name) for s in branch.state], measured))
    choices = [choose("remember", (branch.text,), device) for _, branch, *_ in parts]
    unseen = [i for i, choice in enumerate(choices) if choice.impl is not None]  # which a kernel writes
    together: dict[object, list[int]] = {}
    for i, choice in enumerate(choices):
        together.setdefault(choice.bind if choice.bind is not None else i, []).append(i)
    runs: list[tuple[list[int], Callable[..., None]]] = []
    for places in together.values():
        choice, branches = choices[places[0]], [parts[i][1] for i in places]
        bound = choice.bind(branches, device) if choice.bind is not None else None
        runs.append((places, bound or _one_by_one(branches, choice.impl)))

    def remember(states: Mapping[str, State], measured: Mapping[str, Sequence[Tensor]]) -> None:
        memories = [{own: states[tensor][name] for own, name in names} for tensor, _, names, _ in parts]
        stats = [
            {s.name: values for s, values in zip(branch.stats, measured[tensor][at], strict=True)}
            for tensor, branch, _, at in parts
        ]
        for places, run in runs:
            run([memories[i] for i in places], [stats[i] for i in places])
        torch.autograd.graph.increment_version([m for i in unseen for m in memories[i].values()])

    return remember


def _one_by_one(
    branches: Sequence[Quantizer], impl: Callable[..., None] | None
) -> Callable[[Sequence[State], Sequence[State]], None]:
    def run(states: Sequence[State], stats: Sequence[State]) -> None:
        for branch, state, found in zip(branches, states, stats, strict=True):
            if impl is not None:
                impl(branch, state, found)
            else:
                branch.remember(state, found)

    return run


def _remember(side: Quantizer, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
    """Take the reduced statistics of a step into the state. A compiler traces what the format wrote."""
    tensors = (*state.values(), *stats.values())
    if can_call_directly(tensors[0]) and ORDINARY.issuperset(map(type, tensors)):
        impl = choose("remember", (side.text,), tensors[0].device).impl
        if impl is not None:
            impl(side, state, stats)
            torch.autograd.graph.increment_version(state.values())  # a kernel writes unseen
            return
    side.remember(state, stats)


def check_input(x: Tensor) -> None:
    """Refuse all but a tensor of numbers of at most fp32, in which everything is computed."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a tensor can be encoded, and not a {type(x).__name__}")
    if x.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"the tensor to encode is {x.dtype}; lpq encodes {names}: cast it first")


def as_matrix(x: Tensor) -> Tensor:
    """View a tensor as a matrix: all leading dimensions are rows, and a vector is one row."""
    if x.dim() == 2:
        return x
    cols = x.shape[-1] if x.dim() else 1
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.reshape(rows, cols)
