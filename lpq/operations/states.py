"""States of quantizers: the statistics that they remember across steps, read by encoders and moved behind a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.formats.format import Quantizer
from lpq.kernels import choose
from lpq.kernels.table import bound_once
from lpq.operations.format_calls import lacking
from lpq.operations.operators import ORDINARY, can_call_directly, define
from lpq.operations.reduce_statistics import bind_reduction
from lpq.operations.sides import declared
from lpq.torch_private.compiling import is_run_again, saved_if_run_again

State = Mapping[str, Tensor]
Recall = Callable[[None, Any, None], Sequence[Tensor | None]]
"""``recall(None, state, None)``: the statistics to encode with."""


def _branches(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> list[tuple[str, Quantizer]]:
    """The state prefix and the quantizer of each set of statistics that encoding these directions measures."""
    state = quantizer.state_branches()
    if "" in state and (row, col) != (None, None):
        return [("", state[""])]
    sides = (("row_", row), ("col_", col))
    return [(prefix, branch) for prefix, branch in sides if branch is not None]


def recall(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None, state: State) -> list[Tensor | None]:
    """The statistics to encode with, from the state; None where a direction remembers nothing."""
    stats: list[Tensor | None] = bind_recall(quantizer, row, col, None)(None, state, None)
    return stats


def bind_recall(
    quantizer: Quantizer,
    row: Quantizer | None,
    col: Quantizer | None,
    run: Callable[[Any, list[Tensor | None], Any], Any] | None,
) -> Callable[[Any, State, Any], Any]:
    """Return ``run(x, stats, seed)``, which encodes these operands by given statistics, as a function of ``x``, a state
    and the seed: the statistics are those that the formats' ``recall`` takes from the state, in the order of ``stats``,
    and None where a direction remembers nothing. Without ``run`` the function returns them. It is one call, as each
    step makes it for each tensor."""
    bound = [
        (branch, branch.recall, [(s.name, prefix + s.name) for s in branch.state], [s.name for s in branch.stats])
        for prefix, branch in _branches(quantizer, row, col)
    ]

    def recall(x: Any, state: State, seed: Any) -> Any:
        stats: list[Tensor | None] = []
        for branch, recalled_by, names, stat_names in bound:
            if not names:
                stats += [None] * len(stat_names)
                continue
            by_name = recalled_by({own: state[name] for own, name in names})
            try:
                own_stats = [by_name[name] for name in stat_names]
            except (KeyError, IndexError, TypeError) as error:  # as a tensor, or None, in place of a dict
                raise lacking(branch, "recall", by_name, error.args[0]) from None
            stats += [None if stat is None else stat.contiguous() for stat in own_stats]
        return stats if run is None else run(x, stats, seed)

    return recall


def as_first_run(state: State) -> State:
    """In compiled code return the state by which forward runs: a copy that is saved, where activation checkpointing
    makes forward run again, behind a step."""
    return _copied(state) if is_run_again() else state


def as_in_forward(state: State, buffers: Sequence[Tensor]) -> tuple[State, Sequence[Tensor]]:
    """In compiled code return the state as it is now, for operators that may run in backward, and buffers that forward
    needs. A compiler would keep the state itself, and copy in backward, behind a step. It never makes again what
    forward needs of a custom operator: so one that takes the copies of the state makes a copy of the smallest buffer.
    """
    at, state = min(range(len(buffers)), key=lambda i: buffers[i].numel()), _copied(state)
    return state, [*buffers[:at], torch.ops.lpq.copy(buffers[at], [*state.values()]), *buffers[at + 1 :]]


def _copied(state: State) -> State:
    return {name: saved_if_run_again(torch.ops.lpq.copy, memory, []) for name, memory in state.items()}


define("copy(Tensor x, Tensor[] after) -> Tensor", lambda x, after: x.clone(), lambda x, after: torch.empty_like(x))


def state_names(quantizer: Quantizer) -> list[str]:
    """The names of the statistics in a state, in order."""
    return [prefix + s.name for prefix, branch in quantizer.state_branches().items() for s in branch.state]


def recalls(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> tuple[bool, ...]:
    """For each statistic whether ``recall`` returns it."""
    return tuple(branch.recalls(stat) for _, branch in _branches(quantizer, row, col) for stat in branch.stats)


def moves(quantizer: Quantizer, row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether encoding these directions measures what ``remember`` takes into the state."""
    return any(branch.moves for _, branch in _branches(quantizer, row, col))


def measures_fresh(quantizer: Quantizer) -> bool:
    """Whether a layer measures, and recalls nothing, while its state of a tensor is empty. The states of both
    directions, where each has its own, must be such."""
    remembering = [branch for branch in quantizer.state_branches().values() if branch.state]
    return bool(remembering) and all(branch.moves and branch.fresh == "measure" for branch in remembering)


def remember(
    quantizer: Quantizer,
    state: State,
    measured: list[Tensor],
    *,
    row: bool = True,
    col: bool = True,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce the statistics that ``encode_operands`` measured and take them into the state.

    Args:
        quantizer: The quantizer of the tensor.
        state: The state, which is updated in place.
        measured: The statistics, as ``Operands.measured`` has them.
        row: Whether the row operand was encoded.
        col: Whether the column operand was encoded.
        group: The ranks that have the other shards; None: statistics are not reduced.
    """
    sides = (quantizer.side("row") if row else None, quantizer.side("col") if col else None)
    if group is not None and moves(quantizer, *sides):
        apart = quantizer.col_source == "row"  # then equal sides have statistics of their own, too
        along = declared(sides[0], None) + declared(None, sides[1]) if apart else declared(*sides)
        along = along[: len(measured)]  # none of a column operand that remembers none
        bind_reduction([along], group, 1)([measured], None)
    tensors = (*state.values(), *measured)
    direct = tensors and can_call_directly(tensors[0]) and ORDINARY.issuperset(map(type, tensors))
    moving = (Moving("", quantizer, row, col),)
    _remember_bound(moving, tensors[0].device if direct else None)({"": state}, {"": measured})


class Moving(NamedTuple):
    """A tensor of a layer whose quantizer remembers, and the operands for which statistics of it were measured."""

    tensor: str
    """Its name."""
    quantizer: Quantizer
    row: bool
    col: bool


Remember = Callable[[Mapping[str, State], Mapping[str, Sequence[Tensor]]], None]
"""``remember(states, measured)``, by the tensors' names: moves the states of the tensors that were measured."""


def bind_remember(tensors: Sequence[Moving], device: torch.device | None) -> Remember:
    """Bind ``remember`` for several tensors of one layer, without a group. A kernel that binds takes all its states at
    once. No device: something watches, and the formats' own code runs."""
    names = frozenset(moving.tensor for moving in tensors)
    bound = cache(lambda some: _bound([moving for moving in tensors if moving.tensor in some], device))
    bound(names)  # the first call may be one that a CUDA graph records

    def remember(states: Mapping[str, State], measured: Mapping[str, Sequence[Tensor]]) -> None:
        parts, runs, unseen = bound(names.intersection(measured))
        memories = [{own: states[tensor][name] for own, name in keys} for tensor, _, keys, _ in parts]
        stats = [
            {s.name: values for s, values in zip(branch.stats, measured[tensor][at], strict=True)}
            for tensor, branch, _, at in parts
        ]
        for places, run in runs:
            run([memories[i] for i in places], [stats[i] for i in places])
        torch.autograd.graph.increment_version([m for i in unseen for m in memories[i].values()])

    return remember


Part = tuple[str, "Quantizer", Sequence[tuple[str, str]], slice]
"""A tensor, a quantizer that remembers of it, the quantizer's names of its state and their keys in the state of the
tensor, and the place of its statistics among all that are measured."""


def _bound(
    tensors: Sequence[Moving], device: torch.device | None
) -> tuple[list[Part], list[tuple[list[int], Callable[..., None]]], list[int]]:
    """The parts that move; the functions, each with the places of its parts; and the places that kernels write."""
    parts: list[Part] = []
    for tensor, quantizer, row, col in tensors:
        at = 0
        for prefix, branch in _branches(
            quantizer, quantizer.side("row") if row else None, quantizer.side("col") if col else None
        ):
            measured = slice(at, at + len(branch.stats))
            at = measured.stop
            if branch.state and not branch.static:
                parts.append((tensor, branch, [(s.name, prefix + s.name) for s in branch.state], measured))
    if device is None:
        return parts, [([*range(len(parts))], _one_by_one([branch for _, branch, *_ in parts], None))], []
    choices = [choose("remember", (branch.text,), device) for _, branch, *_ in parts]
    together: dict[object, list[int]] = {}
    for i, choice in enumerate(choices):
        together.setdefault(choice.bind if choice.bind is not None else i, []).append(i)
    runs: list[tuple[list[int], Callable[..., None]]] = []
    for places in together.values():
        choice, branches = choices[places[0]], [parts[i][1] for i in places]
        run = choice.bind(branches, device) if choice.bind is not None else None
        runs.append((places, run or _one_by_one(branches, choice.impl)))
    return parts, runs, [i for i, choice in enumerate(choices) if choice.impl is not None]


def _one_by_one(
    branches: Sequence[Quantizer], impl: Callable[..., None] | None
) -> Callable[[Sequence[State], Sequence[State]], None]:
    def run(states: Sequence[State], stats: Sequence[State]) -> None:
        for branch, state, own_stats in zip(branches, states, stats, strict=True):
            if impl is not None:
                impl(branch, state, own_stats)
            else:
                branch.remember(state, own_stats)

    return run


_remember_bound = bound_once(bind_remember)
