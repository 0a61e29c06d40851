"""Collecting: statistics of the inputs of layers while batches go through the model. Scales are computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lpq.calibration.errors import CalibrationError
from lpq.calibration.parallel import Peers, is_shared_out, sending
from lpq.calibration.statistics import Statistics, Together
from lpq.calibration.targets import Target
from lpq.checkpoint.model import is_shared
from lpq.distributed.ranks import difference
from lpq.nn.eagerly import run_eagerly
from lpq.nn.observing import observing
from lpq.tensor.observed import Observed
from lpq.torch_private.pytree import tree_leaves

T = TypeVar("T")
Forward = Callable[[nn.Module, Any], object]
NO_BATCH = object()
BINS = 0x8000 + 1
"""One for each magnitude of bf16, infinity and NaN among them, and one more for what rounds up to it."""
KEPT_BITS = 16


class Pass(NamedTuple):
    """A pass over the batches: its name, and the function that takes statistics of an input."""

    name: str
    take: Callable[[Statistics, Target, Tensor], None]


def tokens(target: Target) -> str:
    """The name of the count of rows that went through a layer."""
    return f"{target.name}.x_rows"


def histogram(target: Target) -> str:
    """The name of the counts of magnitudes of its inputs."""
    return f"{target.name}.x_magnitudes"


def take_statistics(clipped: Mapping[str, Tensor]) -> Pass:
    """The statistics of inputs whose elements are first clipped to ``clipped``, by the name of the layer."""

    def take(statistics: Statistics, target: Target, x: Tensor) -> None:
        if (limit := clipped.get(target.name)) is not None:
            x = torch.minimum(torch.maximum(x, -limit.to(x)), limit.to(x))
        for name, value in target.measured_input(x):
            statistics.take(name, value)

    return Pass("statistics", take)


def take_magnitudes(statistics: Statistics, target: Target, x: Tensor) -> None:
    """Count the magnitudes of an input: in bins that are fixed beforehand, so that counts of parts add up exactly.

    A bin has the magnitudes above one number of bf16, up to the next.
    """
    bits = x.detach().float().abs().view(torch.int32).reshape(-1)
    bins = (bits.long() + ((1 << KEPT_BITS) - 1)) >> KEPT_BITS
    statistics.take(histogram(target), torch.bincount(bins, minlength=BINS))


MAGNITUDES = Pass("magnitudes", take_magnitudes)


def upper_end(number: int) -> float:
    """The largest magnitude of a bin."""
    return float(torch.tensor(number << KEPT_BITS, dtype=torch.int64).to(torch.int32).view(torch.float32))


class Progress(NamedTuple):
    """How far a pass is: the batches that are in the statistics, of all ranks together, and their samples."""

    batches: int = 0
    samples: int = 0


class _Facts(NamedTuple):
    """A rank's message to the others before a round."""

    samples: int | None
    """The number of samples of its next batch; None: it has no more."""
    team: tuple[int, ...]
    """The ranks that get the same batches, as layers are sharded over them."""
    exchange: tuple[int, ...]
    """The ranks that exchange rows of experts."""


@torch.no_grad()
def collect(
    model: nn.Module,
    targets: Sequence[Target],
    batches: Iterable[Any],
    how: Pass,
    *,
    samples: int,
    forward: Forward,
    ranks: Together,
    team: Peers,
    statistics: Statistics,
    begin: int,
    after: Callable[[Progress], None],
) -> Progress:
    """Have batches go through the model, one on each rank at a time, and take statistics until there are ``samples``.

    Batches are counted in the order of ranks: the first of each, the second of each. The counted batches do not depend
    on the number of ranks, if batches are dealt out in turn; ranks of a ``team`` have one batch together. A rank that
    has no batch left goes through the model with its last one, of which no statistics are taken: others may wait for it
    there. ``begin``: the number of batches that are in ``statistics`` already. ``after`` is called after each round, on
    all ranks alike.
    """
    mine, progress, last = iter(batches), Progress(), NO_BATCH

    def together(function: Callable[[], T]) -> list[T]:
        return ranks.all(function) if ranks.many else [function()]  # one process has the error itself

    def next_facts() -> _Facts:
        nonlocal last
        batch = next(mine, NO_BATCH)
        last = batch if batch is not NO_BATCH else last
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)  # or a tokenizer's mapping is a leaf
        tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
        if tensor is None and batch is not NO_BATCH:
            raise CalibrationError(f"a batch is a {type(batch).__name__} without a tensor: pass arguments of the model")
        return _Facts(None if tensor is None else tensor.shape[0], team.ranks, team.exchange)

    def run(own: int, turns: int, counted: bool, leads: bool) -> None:
        for turn in range(turns):
            now = counted and turn == own
            seen = [target for target in targets if target.names("x") and _counts(target, team, now, leads)]
            taking = _Taking(seen, how, statistics)
            with observing([target.layer for target in seen], taking), sending(model, now):
                forward(model, last)

    while progress.samples < samples:
        facts = together(next_facts)
        heads = _heads(facts)
        if all(one.samples is None for one in facts):
            if not progress.batches:
                raise CalibrationError("there is no batch: pass some, and a list or a DataLoader if it is used again")
            break
        without = [rank for rank, one in enumerate(facts) if one.samples is None]
        if progress.batches == 0 and without:
            raise CalibrationError(f"rank {without[0]} has no batch at all: give each rank one at least")
        progress, number = _advanced(progress, facts, heads, team, samples)
        if progress.batches <= begin:
            continue  # all of this round are in the statistics
        counted, leads = number is not None and number >= begin, heads[team.ranks] == ranks.rank
        passes = partial(run, *_turns(facts, team), counted, leads)
        if is_shared(model, replicas=False):  # others may wait inside of it for a rank that raises, and not here
            passes()
        else:
            together(passes)
        after(progress)
    return progress


def through(model: nn.Module, batch: Any) -> object:
    """Call the model with a batch: a tensor, a sequence of arguments or a mapping of them by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have the model evaluate inside, not compiled."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with run_eagerly():
            yield
    finally:
        for module in training:
            module.training = True


class _Taking:
    """Takes statistics of the inputs of layers, and of the rows that their experts are given."""

    def __init__(self, targets: Iterable[Target], how: Pass, statistics: Statistics) -> None:
        self._targets = {(id(target.layer), target.stack, target.expert): target for target in targets}
        self._how, self._statistics = how, statistics

    def observe(self, tensor: Observed) -> None:
        """Take the statistics of an input."""
        for part in tensor.groups() if tensor.name == "x" else ():
            x = part.value
            if rows := x.numel() // max(x.shape[-1], 1):
                target = self._targets[id(part.layer), part.stack, part.group]
                self._statistics.take(tokens(target), torch.tensor(rows, dtype=torch.int64, device=x.device))
                self._how.take(self._statistics, target, x)


def _counts(target: Target, team: Peers, counted: bool, leads: bool) -> bool:
    """Whether this rank takes the input of a layer, in a turn in which its batch is ``counted`` or not.

    A layer that is divided over the ranks of a team is multiplied whole on each of them, and the one that ``leads``
    takes its input. Experts that are divided over ranks get the rows of all ranks, but no rows of a batch that does not
    count.
    """
    if target.layer in team.layers:
        return counted and leads
    return counted or (target.expert is not None and is_shared_out(target.layer))


def _turns(facts: Sequence[_Facts], team: Peers) -> tuple[int, int]:
    """Which turn is this rank's among those that exchange rows with it, and how many there are."""
    teams: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for one in facts:
        teams.setdefault(one.exchange, {})[one.team] = None
    return [*teams[team.exchange]].index(team.ranks), max(map(len, teams.values()))


def _heads(facts: Sequence[_Facts]) -> dict[tuple[int, ...], int]:
    """The rank of each team that counts its batches; all ranks of a team must have the same samples."""
    heads: dict[tuple[int, ...], int] = {}
    for rank, one in enumerate(facts):
        first = heads.setdefault(one.team, rank)
        if facts[first].samples != one.samples:
            batches = {at: [f"{facts[at].samples or 'no'} samples"] for at in (first, rank)}
            raise CalibrationError(
                f"the ranks {[*one.team]} share layers under tensor parallelism and have other batches: "
                f"{difference(batches)}. Give them the same batches"
            )
    return heads


def _advanced(
    start: Progress, facts: Sequence[_Facts], heads: Mapping[tuple[int, ...], int], team: Peers, samples: int
) -> tuple[Progress, int | None]:
    """How far the pass is after a round, and which number the batch of this team has; None if it does not count, as the
    team has none or there are ``samples`` without it."""
    progress, number = start, None
    for rank, one in enumerate(facts):
        if one.samples is not None and progress.samples < samples and heads[one.team] == rank:
            number = progress.batches if one.team == team.ranks else number
            progress = Progress(progress.batches + 1, progress.samples + one.samples)
    return progress, number
