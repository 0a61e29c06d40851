"""Plots of results, PNG by matplotlib, from stored numbers alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import BASELINE
from benchmarks.tables import Result, name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"torch": "#8a8f98", "lpq": "#3f51b5", "torchao": "#e07a3f", "TransformerEngine": "#5b9a4b"}


def draw(part: str, result: Result, path: Path) -> bool:
    """Draw a part into a file; False, and nothing drawn, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(result["shapes"]) if part in ("linear", "grouped") else 1
    across = min(count, 2)  # more of them could not be read on a page
    down = -(-count // across)
    figure = Figure(figsize=(4.2 + 2.6 * across, down * (1.2 + 0.22 * _lines(part, result))), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    for axes in all_axes[count:]:
        axes.remove()
    _OF[part](all_axes[:count], result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _lines(part: str, result: Result) -> int:
    if part == "casts":
        return len(_measured(result))
    return len(result["shapes"][0]["results"] if part in ("linear", "grouped") else result["results"])


def _bars(axes: Axes, rows: list[Result], values: list[float | None], digits: int = 2) -> None:
    """One bar a contender, with its value; compiled ones are hatched."""
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        hatch = "//" if row.get("compiled") else None
        color = COLORS[row.get("library", "lpq")]
        axes.barh(place, value or 0, color=color, hatch=hatch, edgecolor="white", height=0.78)
        text = f"{value:,.{digits}f}" if value is not None else "failed"
        axes.annotate(text, (value or 0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.18)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _named(rows: list[Result]) -> list[Result]:
    return [{**row, "name": name(row)} for row in rows]


def _goal(axes: Axes, value: float) -> None:
    axes.axvline(value, color="#c62828", linewidth=0.9, linestyle="--")


def _linear(all_axes: Any, result: Result) -> None:
    for axes, shape in zip(all_axes, result["shapes"], strict=True):
        rows = _named(shape["results"])
        _bars(axes, rows, [row.get("ms") for row in rows])
        _goal(axes, shape["floors"]["fp8-current"]["ms"])
        axes.set_title(f"{shape['tokens']}x{shape['inputs']}x{shape['outputs']}", fontsize=9)
        axes.set_xlabel("ms; dashed: floor of fp8-current", fontsize=7)


def _grouped(all_axes: Any, result: Result) -> None:
    for axes, shape in zip(all_axes, result["shapes"], strict=True):
        rows = _named(shape["results"])
        _bars(axes, rows, [row.get("ms") for row in rows])
        if "ms" in shape["floor"]:
            _goal(axes, shape["floor"]["ms"])
        axes.set_title(f"{shape['experts']}x{shape['tokens']}x{shape['inputs']}x{shape['outputs']}", fontsize=9)
        axes.set_xlabel("ms; dashed: floor of FP8, exact gradients", fontsize=7)


def _host(all_axes: Any, result: Result) -> None:
    rows = _named(result["results"])
    _bars(all_axes[0], rows, [row.get("us") for row in rows], 0)
    base = next((row.get("us") for row in rows if row["name"] == BASELINE), None)
    if base:
        _goal(all_axes[0], base)
    all_axes[0].set_xlabel(f"µs of a step at {result['shape']}; dashed: nn.Linear", fontsize=8)


def _stack(all_axes: Any, result: Result) -> None:
    rows = _named(result["results"])
    _bars(all_axes[0], rows, [row.get("tokens_per_second") for row in rows], 0)
    all_axes[0].set_xlabel(f"tokens/s and GPU, {result['ranks']} rank(s)", fontsize=8)


def _measured(result: Result) -> list[Result]:
    """The casts that have a time."""
    return [case for case in [*result["cases"], *result.get("peers", [])] if "share" in case]


def _casts(all_axes: Any, result: Result) -> None:
    rows = [
        {**case, "name": f"{case.get('library', '')} {case['name']}, {case['sides']}".strip()}
        for case in _measured(result)
    ]
    _bars(all_axes[0], rows, [100 * row["share"] for row in rows], 0)
    _goal(all_axes[0], 100)
    all_axes[0].set_xlabel("% of copy speed", fontsize=8)


_OF: dict[str, Callable[[Any, Result], None]] = {
    "casts": _casts, "linear": _linear, "grouped": _grouped, "host": _host, "stack": _stack, "llama": _stack,
}  # fmt: skip
