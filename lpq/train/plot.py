"""The picture of a run: the losses, and below them the gap of each recipe to the baseline."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpq.train.trainings import Training

WINDOW = 20
"""A curve is smoothed over this part of its steps: a twentieth."""
LABEL = 96
"""How many characters of a label stand in one line."""
MISSING = 'no plot, for matplotlib is not installed (pip install "lpq[train]")'


@dataclass(frozen=True)
class Curve:
    """The losses of one training, and its name."""

    title: str
    losses: Sequence[float]


def draw(curves: Sequence[Curve], baseline: Curve | None, path: Path, other: Curve | None = None) -> str:
    """Draw the losses, and the gaps where there is a baseline; return the file's name, or why there is none.

    ``other`` is the baseline with another seed: how far it is from the baseline is a band around the gap of zero.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    everything = [*curves, *([baseline] if baseline is not None else [])]
    labels = [textwrap.fill(curve.title, LABEL) for curve in everything]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 4 + 2 * (baseline is not None) + 0.2 * lines), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    heights = [2] if baseline is None else [2, 1]
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    colours = [f"C{i % 10}" for i in range(len(curves))] + ["0.35"] * (baseline is not None)
    handles = [trace(axes[0], curve.losses, colour) for curve, colour in zip(everything, colours, strict=True)]
    axes[0].set_ylabel("training loss (nats per byte)")
    if baseline is not None:
        draw_gaps(axes[1], curves, baseline, colours, other)
        if other is not None:
            labels[-1] += f"; below: ± its distance from {other.title}"
    finish(figure, [*axes], handles, labels, fontsize="small")
    figure.savefig(path)
    return path.name


def finish(figure: Any, panels: Sequence[Any], handles: Sequence[Any], labels: Sequence[str], **how: Any) -> None:
    """Give panels over the same steps their grids, and the figure its legend."""
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
        panel.margins(x=0.01)
    panels[-1].set_xlabel("step")
    legend = figure.legend(handles, labels, loc="outside upper left", frameon=False, **how)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a file's name may have a dollar


def draw_gaps(
    panel: Any, curves: Sequence[Curve], baseline: Curve, colours: Sequence[str], other: Curve | None
) -> None:
    """Draw by how many per cent each loss is above the baseline's, a line where they are equal, and what a seed
    changes as a band."""
    panel.axhline(0, color="0.35", linewidth=1)
    limits = [0.0]
    if other is not None:
        steps, distances = distance(other, baseline)
        panel.fill_between(steps, [-d for d in distances], distances, color="0.85", linewidth=0)
        limits += [*distances, *(-d for d in distances)]
    for curve, colour in zip(curves, colours, strict=False):
        each = [100 * (a / b - 1) for a, b in zip(curve.losses, baseline.losses, strict=False)]
        trace(panel, each, colour)
        limits += smooth(each)[1]
    room = 0.3 * (max(limits) - min(limits)) or 0.1
    panel.set_ylim(min(limits) - room, max(limits) + room)  # single steps scatter far beyond their mean
    panel.set_ylabel(f"gap to {baseline.title} (%)")


def distance(other: Curve, baseline: Curve) -> tuple[list[int], list[float]]:
    """Return steps, and by how many per cent two smooth curves differ around each.

    Means are compared, since batches of another seed are other text: single losses differ by more than the models do.
    """
    steps, means = smooth(other.losses)
    each = [100 * abs(a / b - 1) for a, b in zip(means, smooth(baseline.losses)[1], strict=False)]
    middles, distances = smooth(each)
    return [steps[i - 1] for i in middles], distances


def trace(panel: Any, values: Sequence[float], colour: str) -> Any:
    """Draw the values faintly and their means clearly; return the clear line."""
    panel.plot(range(1, len(values) + 1), values, color=colour, alpha=0.2, linewidth=0.8)
    (line,) = panel.plot(*smooth(values), color=colour, linewidth=1.6)
    return line


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


# ---------------------------------------------------------------------------------------------- several seeds

POINTS = 400
"""About how many points of a curve are drawn."""


def draw_compared(trainings: Sequence[Training], path: Path) -> str:
    """Draw the losses of recipes beside the baseline, and below them the gaps to the baseline of the same seed: means
    over the seeds, with the baseline's own spread as a band. Return the file's name, or why there is none.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FormatStrFormatter
    except ImportError:
        return MISSING
    curves: dict[str, dict[int, list[float]]] = {}
    steps: list[int] = []
    base = next((t.title for t in trainings if t.baseline), "")
    for t in trainings:
        if t.diverged is None:
            steps, curves.setdefault(t.title, {})[t.seed] = smooth(t.losses)
    titles = [title for title in curves if title != base and curves[title].keys() & curves.get(base, {}).keys()]
    if not titles:
        return "no figure yet, for no recipe has ended beside the baseline of its seed"
    figure = Figure(figsize=(8, 6.4 + 0.2 * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    some = slice(None, None, max(1, len(steps) // POINTS))
    own = list(curves[base].values())
    middle = [fmean(at) for at in zip(*own, strict=True)]
    handles = [upper.plot(steps[some], middle[some], color="0.35", linewidth=1.6)[0]]
    limits = [0.0]
    if len(own) > 1:
        band = [100 * stdev(at) / mean for at, mean in zip(zip(*own, strict=True), middle, strict=True)]
        lower.fill_between(steps[some], [-b for b in band[some]], band[some], color="0.85", linewidth=0)
        limits += [fmean(band), -fmean(band)]
    lower.axhline(0, color="0.35", linewidth=1)
    for i, title in enumerate(titles):
        pairs = [(curve, curves[base][seed]) for seed, curve in curves[title].items() if seed in curves[base]]
        mean = [fmean(at) for at in zip(*(curve for curve, _ in pairs), strict=True)]
        each = [[100 * (a / b - 1) for a, b in zip(*pair, strict=True)] for pair in pairs]
        gap = [fmean(at) for at in zip(*each, strict=True)]
        handles += upper.plot(steps[some], mean[some], color=f"C{i % 10}", linewidth=1)
        lower.plot(steps[some], gap[some], color=f"C{i % 10}", linewidth=1.4)
        limits += [min(gap[len(gap) // 4 :]), max(gap[len(gap) // 4 :])]
    room = 0.2 * (max(limits) - min(limits)) or 0.1
    lower.set_ylim(min(limits) - room, max(limits) + room)  # the first quarter scatters far beyond the rest
    upper.set_yscale("log")
    for axis in ("major", "minor"):
        getattr(upper.yaxis, f"set_{axis}_formatter")(FormatStrFormatter("%g"))
    upper.set_ylabel("training loss (nats per byte)")
    lower.set_ylabel(f"gap to {base} of the same seed (%)")
    seeds = f"{len(own)} seed{'s'[: len(own) != 1]}"
    labels = [f"{base}, mean of {seeds}; below: ± its standard deviation over seeds", *titles]
    finish(figure, (upper, lower), handles, [textwrap.fill(label, LABEL) for label in labels])
    with mpl.rc_context({"svg.hashsalt": "lpq", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path.name
