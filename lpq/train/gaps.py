"""How far recipes are from bf16 of the same seed: means, spreads and intervals, of the files of trainings alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from lpq.train.trainings import Training

# fmt: off
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
           2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on
"""The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom."""
NORMAL = 1.959964
"""The same quantile of the normal distribution."""
COLUMNS = ("recipe", "seeds", "loss", "gap", "± 95 %", "shown", "spread", "tokens/s")
"""The columns of the table."""
MEANINGS = (
    "",
    "",
    "Loss: nats per byte on text that was held out, mean over the seeds.",
    "Gap: by how much a loss is above the loss of {0} with the same seed, so with the same first weights and the same "
    "batches; mean over the seeds.",
    "± 95 %: half of the interval of this mean by Student's t for pairs, for each recipe alone.",
    "Shown: nothing, where 0 is in the interval, or there is one seed; identical, where every loss of every step is "
    "{0}'s, as by a policy that converts no layer.",
    "Spread: the standard deviation over the seeds, of the loss of {0}, or of the gaps of a recipe.",
)
"""The meaning of each column; empty where its head says all."""


@dataclass(frozen=True)
class Gap:
    """A recipe beside the baseline; gaps and spreads are parts of the baseline's loss."""

    title: str
    seeds: int
    """The seeds that are counted: a recipe's training ended, and so did the baseline's of the same seed."""
    diverged: int
    loss: float | None
    mean: float | None
    """The mean gap; None for the baseline, and where a training diverged."""
    spread: float | None
    half: float | None
    """Half of the interval; None for fewer than two seeds."""
    tokens_per_second: float
    identical: bool = False
    """Whether every loss of its trainings is the baseline's of the same seed."""

    @property
    def verdict(self) -> str:
        """Whether the gap is told apart from none."""
        if self.diverged:
            return f"{self.diverged} diverged"
        if self.mean is None:
            return ""
        if self.identical:
            return "identical"
        if self.half is None or abs(self.mean) <= self.half:
            return "nothing"
        return "worse" if self.mean > 0 else "better"

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        interval = ""
        if self.mean is not None and self.half is not None:
            interval = f"{100 * self.half:.2f} %"
        return (
            self.title,
            str(self.seeds),
            "" if self.loss is None else f"{self.loss:.4f}",
            "" if self.mean is None else f"{100 * self.mean:+.2f} %",
            interval,
            self.verdict,
            "" if self.spread is None else f"{100 * self.spread:.2f} %",
            f"{self.tokens_per_second:,.0f}",
        )


def meaning_of(meanings: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> str:
    """The meanings of the columns that have a cell: a table leaves the others out."""
    columns = zip(*rows, strict=True)
    return " ".join(text.format(title) for text, cells in zip(meanings, columns, strict=True) if text and any(cells))


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL  # from here on two terms of the series of Fisher and Cornish are right to 0.001
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def gaps(trainings: Sequence[Training]) -> list[Gap]:
    """The baseline, then each recipe in the order of their gaps; empty while no baseline ended."""
    of: dict[str, dict[int, Training]] = {}
    for training in trainings:
        of.setdefault(training.title, {})[training.seed] = training
    base = {t.seed: t for t in trainings if t.baseline}
    rows = [_gap(title, own, base) for title, own in of.items() if any(t.seed in base for t in own.values())]
    return sorted(rows, key=lambda g: (g.title not in {t.title for t in base.values()}, _order(g), g.title))


def _order(gap: Gap) -> float:
    return math.inf if gap.mean is None else gap.mean


def _gap(title: str, own: dict[int, Training], base: dict[int, Training]) -> Gap:
    pairs = [(own[seed], base[seed]) for seed in own if seed in base]
    diverged = sum(t.result is None for t, _ in pairs)
    speed = median(t.tokens_per_second for t, _ in pairs)
    results = [(t.result, b.result) for t, b in pairs]
    ended = [(a, b) for a, b in results if a is not None and b is not None]
    if diverged or not ended:
        return Gap(title, len(pairs), diverged, None, None, None, None, speed)
    loss = fmean(a for a, _ in ended)
    if any(t.baseline for t, _ in pairs):
        spread = stdev(a for a, _ in ended) / loss if len(ended) > 1 else None
        return Gap(title, len(ended), 0, loss, None, spread, None, speed)
    each = [a / b - 1 for a, b in ended]
    spread = stdev(each) if len(each) > 1 else None
    half = None if spread is None else student(len(each) - 1) * spread / math.sqrt(len(each))
    identical = all(t.losses == b.losses and t.held_out == b.held_out for t, b in pairs)
    return Gap(title, len(each), 0, loss, fmean(each), spread, half, speed, identical)


def markdown(trainings: Sequence[Training]) -> str:
    """The table for a page."""
    rule = ["---", *["---:"] * 4, "---", *["---:"] * 2]
    rows = [COLUMNS, rule, *(g.cells() for g in gaps(trainings))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
