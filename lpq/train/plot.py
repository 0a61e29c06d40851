"""The picture of trainings: their losses, and below them the gaps to the baseline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lpq.train.trainings import Training

WINDOW = 20
"""A curve is smoothed over this part of its steps: a twentieth."""
POINTS = 400
"""About how many points of a curve are drawn."""
LABEL = 96
"""How many characters of a label stand in one line."""
MISSING = 'no plot, for matplotlib is not installed (pip install "lpq[train]")'


class Curve(NamedTuple):
    """The losses of one training, by the names that ``Training`` has."""

    title: str
    seed: int
    losses: Sequence[float]
    baseline: bool = False
    diverged: str | None = None


def draw(trainings: Sequence[Training | Curve], path: Path) -> str:
    """Draw the losses of recipes beside the baseline, and below them the gaps to the baseline of the same seed: means
    over the seeds, with the baseline's own spread as a band. Without a baseline there are the losses alone. Return the
    file's name, or why there is none.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FormatStrFormatter
    except ImportError:
        return MISSING
    own: dict[int, list[float]] = {}
    curves: dict[str, dict[int, list[float]]] = {}
    steps: list[int] = []
    base = next((t.title for t in trainings if t.baseline), None)
    for t in trainings:
        if t.diverged is None:
            of_title = own if t.baseline else curves.setdefault(t.title, {})
            steps, of_title[t.seed] = smooth(t.losses)
    titles = [title for title in curves if base is None or curves[title].keys() & own.keys()]
    if not titles:
        return "no figure yet, for no recipe has ended beside the baseline of its seed"
    labels = [textwrap.fill(title, LABEL) for title in titles]
    if own:
        spread = "; below: ± its standard deviation over seeds" if len(own) > 1 else ""
        labels.insert(0, textwrap.fill(f"{base}, mean of {len(own)} seed{'s'[: len(own) != 1]}{spread}", LABEL))
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 6.2 + 0.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3, 2] if own else [1]
    panels = [*figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]]
    upper, lower = panels[0], panels[-1]
    some = slice(None, None, max(1, len(steps) // POINTS))
    handles, limits = [], [0.0]
    if own:
        middle = _mean(own.values())
        handles += upper.plot(steps[some], middle[some], color="0.35", linewidth=1.6)
        if len(own) > 1:
            band = [100 * stdev(at) / mean for at, mean in zip(zip(*own.values(), strict=True), middle, strict=True)]
            lower.fill_between(steps[some], [-b for b in band[some]], band[some], color="0.85", linewidth=0)
            limits += [fmean(band), -fmean(band)]
        lower.axhline(0, color="0.35", linewidth=1)
    for i, title in enumerate(titles):
        pairs = [(curve, own[seed]) for seed, curve in curves[title].items() if seed in own]
        mean = _mean([curve for curve, _ in pairs] or curves[title].values())
        style = f"C{i % 10}{'-' if i < 10 else '--'}"  # ten colours, twice
        handles += upper.plot(steps[some], mean[some], style, linewidth=1)
        if own:
            gap = _mean([[100 * (a / b - 1) for a, b in zip(*pair, strict=True)] for pair in pairs])
            lower.plot(steps[some], gap[some], style, linewidth=1.4)
            limits += [min(gap[len(gap) // 4 :]), max(gap[len(gap) // 4 :])]
    upper.set_yscale("log")
    for axis in ("major", "minor"):
        getattr(upper.yaxis, f"set_{axis}_formatter")(FormatStrFormatter("%g"))
    upper.set_ylabel("training loss (nats per byte)")
    if own:
        room = 0.2 * (max(limits) - min(limits)) or 0.1
        lower.set_ylim(min(limits) - room, max(limits) + room)  # the first quarter scatters far beyond the rest
        lower.set_ylabel(f"gap to {base} of the same seed (%)")
    _finish(figure, panels, handles, labels)
    with mpl.rc_context({"svg.hashsalt": "lpq", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path.name


def _finish(figure: Any, panels: Sequence[Any], handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Give panels over the same steps their grids, and the figure its legend."""
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
        panel.margins(x=0.01)
    panels[-1].set_xlabel("step")
    legend = figure.legend(handles, labels, loc="outside upper left", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a file's name may have a dollar


def _mean(curves: Iterable[Sequence[float]]) -> list[float]:
    """The mean of several curves at each step."""
    return [fmean(at) for at in zip(*curves, strict=True)]


def smooth(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return steps, and the means of the values around each.

    A window has its step in the middle, so that the curve lags nowhere. Steps too near to an end for a whole window are
    left out.
    """
    half = len(values) // WINDOW // 2
    width = 2 * half + 1
    sums = [0.0, *accumulate(values)]
    middles = range(half, len(values) - half)
    return [i + 1 for i in middles], [(sums[i + half + 1] - sums[i - half]) / width for i in middles]
