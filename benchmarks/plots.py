"""Charts of results, as SVG that a light and a dark page can show, from stored numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks import tables
from benchmarks.tables import Result, measured, name
from lpq.bench import chart, speedups
from lpq.bench.contenders import BASELINE

CLASSES = {"torch": "torch", "lpq": "lpq", "torchao": "torchao", "TransformerEngine": "te", "Liger": "liger"}
STYLE = """
svg { --back: #ffffff; --edge: #d8dde6; --ink: #1f2937; --soft: #5b6675; --mark: #b3261e;
  --torch: #9aa3b0; --lpq: #2563a8; --torchao: #d98a4b; --te: #6a9f58; --liger: #8e6bbf; }
@media (prefers-color-scheme: dark) {
  svg { --back: #1e2430; --edge: #3a4252; --ink: #e6e9ef; --soft: #a9b2c0; --mark: #ff8a80;
    --torch: #6d7687; --lpq: #7fb2ee; --torchao: #d98a4b; --te: #7fb56c; --liger: #b395dd; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .back { fill: var(--back); stroke: var(--edge); } .axis { stroke: var(--edge); }
.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
.torch { fill: var(--torch); } .lpq { fill: var(--lpq); } .torchao { fill: var(--torchao); } .te { fill: var(--te); }
.liger { fill: var(--liger); }
"""
WIDTH, MARGIN, LINE, BAR = 780, 16, 21, 15


@dataclass(frozen=True)
class Bar:
    """A row of a chart: its name, whose colour it has, and under which heading it stands."""

    name: str
    library: str = "lpq"
    group: str = ""


@dataclass(frozen=True)
class Panel:
    """A column of a chart: one value for each bar, None for what was not measured."""

    heading: str
    values: Sequence[float | None]
    digits: int = 0
    mark: float | None = None
    """Where a dashed line stands."""
    words: Sequence[str] = ()
    """For each bar what stands in the place of a value that is missing, or nothing."""


def draw(result: Result, path: Path) -> None:
    """Draw a result into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn(result), encoding="utf-8")


def drawn(result: Result) -> str:
    """The chart of a result."""
    if result["part"] == "map":
        return chart.svg(result["shapes"], speedups.title(result["environment"]))
    return svg(*of(result))


def caption(result: Result) -> str:
    """The words for what a chart shows."""
    first, *_ = tables.OF[result["part"]](result).values()
    return first.title


def of(result: Result) -> tuple[list[Bar], list[Panel]]:
    """The bars and panels of a result."""
    return _OF[result["part"]](result)


def svg(bars: Sequence[Bar], panels: Sequence[Panel]) -> str:
    """The chart: names at the left, and two panels at most beside each other."""
    ordered = sorted(range(len(bars)), key=lambda i: [b.group for b in bars].index(bars[i].group))
    label = 10 + 7.0 * max(len(text) for bar in bars for text in (bar.name, bar.group))
    across = min(len(panels), 2)
    heading = 10 + 6.5 * max(len(panel.heading) for panel in panels)  # long names leave panels no less than this
    wide = max((WIDTH - 2 * MARGIN - label) / across, heading)
    width = round(2 * MARGIN + label + across * wide)
    parts: list[str] = []
    top = float(MARGIN)
    for first in range(0, len(panels), across):
        beside = panels[first : first + across]
        for i, panel in enumerate(beside):
            parts.append(_text(MARGIN + label + i * wide, top + 12, panel.heading, "soft"))
        y = top + 24
        started = y
        group = ""
        for place in ordered:
            bar = bars[place]
            if bar.group != group:
                group = bar.group
                y += 4 if y > started else 0
                parts.append(_text(MARGIN, y + 12, group, "soft"))
                y += LINE
            parts.append(_text(MARGIN + label - 8, y + 12, bar.name, "", "end"))
            for i, panel in enumerate(beside):
                words = panel.words[place] if panel.words else "–"
                parts.append(_bar(MARGIN + label + i * wide, y, wide - 78, bar, panel, panel.values[place], words))
            y += LINE
        for i, panel in enumerate(beside):
            parts += _lines(MARGIN + label + i * wide, started, y, wide - 78, panel)
        top = y + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:.0f}" width="{width}" role="img">'
    back = f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{top - 1:.0f}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="12.5" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(panel: Panel, wide: float) -> float:
    """Pixels for a unit."""
    return wide / max([1e-9, panel.mark or 0, *(value or 0 for value in panel.values)])


def _bar(x: float, y: float, wide: float, bar: Bar, panel: Panel, value: float | None, words: str) -> str:
    if value is None:
        return _text(x + 5, y + 12, words, "soft")
    long = value * _scale(panel, wide)
    shape = f'<rect class="{CLASSES[bar.library]}" x="{x:.1f}" y="{y:.1f}" width="{long:.1f}" height="{BAR}" rx="2"/>'
    return shape + _text(x + long + 5, y + 12, f"{value:,.{panel.digits}f}", "")


def _lines(x: float, top: float, bottom: float, wide: float, panel: Panel) -> list[str]:
    places = [("axis", x)] + ([("mark", x + panel.mark * _scale(panel, wide))] if panel.mark else [])
    return [f'<path class="{kind}" d="M{at:.1f} {top - 3:.1f} V{bottom:.1f}"/>' for kind, at in places]


def _bars(rows: Sequence[Result]) -> list[Bar]:
    """A bar for each contender; those that are compiled stand by themselves, if others are not."""
    both = len({row["compiled"] for row in rows}) == 2
    return [
        Bar(
            name({**row, "compiled": False}) if both else name(row),
            row["library"],
            ("with torch.compile" if row["compiled"] else "without torch.compile") if both else "",
        )
        for row in rows
    ]


def _times(result: Result, shape: Result) -> list[float | None]:
    """The times at a shape, in the order of the first one; a run that was ended early has fewer."""
    found = {name(row): row.get("ms") for row in shape["results"]}
    return [found.get(name(row)) for row in result["shapes"][0]["results"]]


def _linear(result: Result) -> tuple[list[Bar], list[Panel]]:
    panels = [
        Panel(
            f"{shape['tokens']}x{shape['inputs']}x{shape['outputs']}: ms (dashed: floor)",
            _times(result, shape), 2, shape["floors"]["fp8-current"]["ms"],
        )
        for shape in result["shapes"]
    ]  # fmt: skip
    return _bars(result["shapes"][0]["results"]), panels


def _grouped(result: Result) -> tuple[list[Bar], list[Panel]]:
    panels = [
        Panel(
            f"{shape['experts']}x{shape['tokens']}x{shape['inputs']}x{shape['outputs']}: ms (dashed: floor)",
            _times(result, shape), 2, shape["floor"].get("ms"),
        )
        for shape in result["shapes"]
    ]  # fmt: skip
    return _bars(result["shapes"][0]["results"]), panels


def _host(result: Result) -> tuple[list[Bar], list[Panel]]:
    rows = result["results"]
    base = next((row.get("us") for row in rows if name(row) == BASELINE), None)
    heading = f"µs of a step at {result['shape']}; dashed: nn.Linear"
    return _bars(rows), [Panel(heading, [row.get("us") for row in rows], 0, base)]


def _training(result: Result) -> tuple[list[Bar], list[Panel]]:
    rows = result["results"]
    gib = [row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None for row in rows]
    each = " and GPU" if result["ranks"] > 1 else ""
    return _bars(rows), [
        Panel(f"tokens per second{each}: more is better", [row.get("tokens_per_second") for row in rows]),
        Panel("peak memory in GiB: less is better", gib, 1),
    ]


def _scaling(result: Result) -> tuple[list[Bar], list[Panel]]:
    """Under each contender a bar for each number of GPUs."""
    rows = sorted(result["results"], key=lambda row: row["ranks"])
    bars = [Bar(f"{row['ranks']} GPU{'s' * (row['ranks'] > 1)}", row["library"], name(row)) for row in rows]
    gib = [row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None for row in rows]
    words = [measured(row, "tokens_per_second", 0) for row in rows]
    speeds = [row.get("tokens_per_second") for row in rows]
    return bars, [
        Panel("tokens per second and GPU: alike is best", speeds, words=words),
        Panel("peak memory of a GPU in GiB", gib, 1),
    ]


def _parallel(result: Result) -> tuple[list[Bar], list[Panel]]:
    rows = result["results"]
    heading = f"ms of a step on {result['ranks']} GPUs; dashed: bf16"
    base = next((row.get("ms") for row in rows if name(row) == BASELINE), None)
    return _bars(rows), [Panel(heading, [row.get("ms") for row in rows], 2, base)]


def _layouts(result: Result) -> tuple[list[Bar], list[Panel]]:
    rows = result["results"]
    gib = [row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None for row in rows]
    words = [measured(row, "ms", 1) for row in rows]
    times = Panel(f"ms of a step on {result['ranks']} GPUs", [row.get("ms") for row in rows], 1, words=words)
    bars = [Bar(name(row), row["library"], row["layout"]) for row in rows]
    return bars, [times, Panel("peak memory in GiB: less is better", gib, 1)]


def _casts(result: Result) -> tuple[list[Bar], list[Panel]]:
    cases = [case for case in [*result["cases"], *result.get("peers", [])] if "share" in case]
    bars = [
        Bar(f"{case.get('library', '')} {case['name']}, {case['sides']}".strip(), case.get("library", "lpq"))
        for case in cases
    ]
    return bars, [Panel("% of copy speed", [100 * case["share"] for case in cases], 0, 100)]


_OF = {
    "casts": _casts, "linear": _linear, "grouped": _grouped, "host": _host, "stack": _training, "llama": _training,
    "parallel": _parallel, "scaling": _scaling, "layouts": _layouts,
}  # fmt: skip
