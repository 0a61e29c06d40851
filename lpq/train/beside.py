"""How far recipes are from one of them, seed by seed, and which part of its gap to the baseline each closes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from lpq.registry.errors import suggestion
from lpq.train.errors import TrainOptionError
from lpq.train.gaps import Gap, gaps, meaning_of, student
from lpq.train.trainings import Training

NARROW = 0.002
"""Two standard errors of a difference that would tell recipes apart."""
COLUMNS = ("recipe", "seeds", "beside {}", "± 95 %", "closes", "± 95 %", f"seeds for {100 * NARROW:g} %")
"""The columns of the table."""
MEANINGS = (
    "",
    "",
    "Beside {0}: by how much a loss is above the loss of {0} with the same seed; mean over the seeds.",
    "± 95 %: half of the interval by Student's t for pairs, for each number alone.",
    "Closes: the part of the gap of {0} to the baseline that a recipe closes, over seeds that have all three; 100 % "
    "has the loss of the baseline. Nothing stands there where that gap is not shown to be above 0.",
    "",
    f"Seeds for {100 * NARROW:g} %: with this number of seeds two standard errors of the difference would be "
    f"{100 * NARROW:g} %.",
)
"""The meaning of each column, as in ``gaps.MEANINGS``."""
NONE_CLOSED = (
    "Which part of the gap of {0} the others close is not told: over the seeds that they share with it, that gap is "
    "not shown to be above 0."
)


def beside(trainings: Sequence[Training], title: str) -> list[Gap]:
    """The recipe of this title, then all others beside it, the baseline among them: ``gaps`` as if that recipe were the
    baseline."""
    return gaps([replace(t, policy="" if t.title == title else t.policy or "no recipe") for t in trainings])


def check(title: str, titles: Iterable[str]) -> None:
    """Raise an error where no training has the title that is asked for."""
    known = [*dict.fromkeys(titles)]
    if title not in known:
        raise TrainOptionError(f"--beside {title}: no training is by it: {suggestion(title, known)}")


@dataclass(frozen=True)
class Closed:
    """The part of a recipe's gap to the baseline that another recipe closes."""

    share: float
    half: float
    """Half of its interval."""


def closed(trainings: Sequence[Training], title: str, of: str) -> Closed | None:
    """How much of the gap of the recipe ``of`` another recipe closes; None where ``of`` is not shown to have a gap, or
    fewer than two seeds have all three."""
    triples = list(_triples(trainings, title, of))
    if len(triples) < 2:
        return None
    gap = [b / base - 1 for base, b, _ in triples]
    rest = [a / base - 1 for base, _, a in triples]
    mean, errors = fmean(gap), student(len(triples) - 1) / math.sqrt(len(triples))
    if mean <= errors * stdev(gap):
        return None
    share = 1 - fmean(rest) / mean
    # The error of a ratio of two means, of what is left and of the gap, to the first order.
    half = errors * stdev(a - (1 - share) * b for a, b in zip(rest, gap, strict=True)) / mean
    return Closed(share, half)


def _triples(trainings: Sequence[Training], title: str, of: str) -> Iterator[tuple[float, float, float]]:
    """The results of the baseline, of ``of`` and of ``title``, for each seed that has all."""
    results = {(t.title, t.seed): t.result for t in trainings}
    for training in trainings:
        base = training.result if training.baseline else None
        second, third = (results.get((name, training.seed)) for name in (of, title))
        if base is not None and second is not None and third is not None:
            yield base, second, third


def rows(trainings: Sequence[Training], of: str) -> list[tuple[str, ...]]:
    """The rows of the table; none while no training by ``of`` ended."""
    baselines = {t.title for t in trainings if t.baseline}
    cells = []
    for gap in beside(trainings, of)[1:]:
        difference = ["", "", ""] if gap.mean is None else [f"{100 * gap.mean:+.2f} %", "", ""]
        if gap.spread is not None and gap.half is not None:
            difference[1] = f"{100 * gap.half:.2f} %"
            difference[2] = str(max(2, math.ceil((2 * gap.spread / NARROW) ** 2)))
        part = None if gap.title in baselines else closed(trainings, gap.title, of)
        shares = ("", "") if part is None else (f"{100 * part.share:z.0f} %", f"{100 * part.half:.0f} %")
        cells.append((gap.title, str(gap.seeds), *difference[:2], *shares, difference[2]))
    return cells


def meaning(rows: Sequence[Sequence[str]], of: str, baseline: str) -> str:
    """The meanings of the columns that have a cell, and why no part of a gap is among them."""
    text = meaning_of(MEANINGS, rows, of)
    closed = [row[COLUMNS.index("closes")] for row in rows if baseline not in (row[0], of)]
    return f"{text} {NONE_CLOSED.format(of)}" if closed and not any(closed) else text


def columns(of: str) -> tuple[str, ...]:
    """The heads of the columns."""
    return tuple(head.format(of) for head in COLUMNS)


def markdown(trainings: Sequence[Training], of: str) -> str:
    """The table for a page."""
    rule = ("---", *["---:"] * (len(COLUMNS) - 1))
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns(of), rule, *rows(trainings, of)))
