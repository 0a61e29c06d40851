"""The page of readings: a small chart for each layer and number over time, in one file that asks for nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from lpq.observe.sums import Reading, named, noise_order
from lpq.observe.table import COLUMNS, cells
from lpq.registry.showing import printable

WORST = 20
"""How many lines the table on top has."""
POINTS = 150
"""About the most points of a line: of more steps, some are left out."""
WIDTH, HEIGHT, LEFT, BOTTOM = 320, 96, 34, 14
LINES = {"x": "#2f7ed8", "w": "#2a9d5c", "dy": "#d9822b", "dw": "#9b59b6"}
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #66727f; --line: #d5dbe1; --paper: #fff; --card: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --soft: #98a4b1; --line: #3a4450; --paper: #14191f; --card: #1c232b } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 90rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 0 .3rem } h2 { font-size: .95rem; margin: 0 0 .4rem; overflow-wrap: anywhere }
p { margin: .3rem 0; color: var(--soft) }
.wide { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:nth-child(-n+2), td:nth-child(-n+2), th:last-child, td:last-child { text-align: left }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem }
.grid { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }
section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem; min-width: 0 }
svg { display: block; width: 100%; height: auto; margin-top: .3rem }
text { fill: var(--soft); font: 9px system-ui, sans-serif } .axis { stroke: var(--line); stroke-width: 1 }
.key span { display: inline-block; margin-right: .9rem }
.key i { display: inline-block; width: 1.4rem; border-top: 3px solid; vertical-align: middle; margin-right: .3rem }
"""


class Chart(NamedTuple):
    """A number that is drawn over time."""

    field: str
    title: str
    form: str
    percent: bool = False
    logarithmic: bool = False


CHARTS = (
    Chart("snr_db", "SNR, dB", "{:.0f}"),
    Chart("flushed", "becomes 0, %", "{:.3g}", percent=True),
    Chart("amax_over_rms", "amax/rms", "{:.3g}", logarithmic=True),
)


def page(readings: Sequence[Reading]) -> str:
    """The page as HTML."""
    cards: dict[tuple[str, str], list[Reading]] = {}
    for one in readings:
        cards.setdefault((one.layer, one.recipe), []).append(one)
    last = max((one.step for one in readings), default=0)
    worst = sorted((one for one in readings if one.step == last), key=noise_order)[:WORST]
    ranges = {chart.field: _range(chart, readings) for chart in CHARTS}
    steps = min((one.step for one in readings), default=0), last
    order = sorted(cards, key=lambda key: min(map(noise_order, cards[key])))
    key = "".join(f'<span><i style="border-color:{color}"></i>{name}</span>' for name, color in LINES.items())
    body = [
        f"<h1>Numerics of a run</h1><p>Steps {steps[0]} to {steps[1]}; the layers with the most noise come first.</p>",
        f'<p class="key">{key}<span>solid: row operand, dashed: column operand</span></p>',
        _table(worst, last),
        '<div class="grid">',
        *(_card(*name, cards[name], ranges, steps) for name in order),
        "</div>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Numerics of a run</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(worst: Sequence[Reading], step: int) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = (
        (_broken_at_dots(name), *(escape(printable(cell)) for cell in others)) for name, *others in map(cells, worst)
    )
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f'<p>The most noise in step {step}:</p><div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def _card(
    layer: str, recipe: str, readings: Sequence[Reading], ranges: dict[str, tuple[float, float]], steps: tuple[int, int]
) -> str:
    charts = "".join(_chart(chart, readings, ranges[chart.field], steps) for chart in CHARTS)
    return f"<section><h2>{_broken_at_dots(named(layer, recipe))}</h2>{charts}</section>"


def _broken_at_dots(text: str) -> str:
    """The text as HTML. On a narrow screen a name goes on in the next line behind a dot, and not within a word."""
    return escape(printable(text)).replace(".", ".<wbr>")


def _value(chart: Chart, reading: Reading) -> float | None:
    value: float | None = getattr(reading, chart.field)
    if value is None or (chart.logarithmic and value <= 0):
        return None
    return math.log10(value) if chart.logarithmic else 100 * value if chart.percent else value


def _range(chart: Chart, readings: Iterable[Reading]) -> tuple[float, float]:
    """The least and the largest number of all layers, which have one scale, so that they can be compared."""
    values = [value for one in readings if (value := _value(chart, one)) is not None] or [0.0]
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _outermost(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points, or where they are many the lowest and the highest of each few: so no outlier is left out."""
    few = -(-2 * len(points) // POINTS)
    if few <= 2:
        return [*points]
    groups = [points[i : i + few] for i in range(0, len(points), few)]
    return [point for own in groups for point in sorted({f(own, key=lambda one: one[1]) for f in (min, max)})]


def _chart(chart: Chart, readings: Sequence[Reading], span: tuple[float, float], steps: tuple[int, int]) -> str:
    """A chart of the operands of one layer."""
    (low, high), (first, last) = span, steps
    across, down = WIDTH - LEFT - 4, HEIGHT - BOTTOM - 14

    def at(step: int, value: float) -> str:
        x = LEFT + across * (0.5 if last == first else (step - first) / (last - first))
        return f"{x:.1f},{14 + down * (1 - (value - low) / (high - low)):.1f}"

    lines: dict[str, list[list[tuple[int, float]]]] = {}
    for one in readings:
        pieces = lines.setdefault(one.operand, [[]])
        if (value := _value(chart, one)) is not None:
            pieces[-1].append((one.step, value))
        elif pieces[-1]:
            pieces.append([])  # no line leads over a number that is not known
    drawn = []
    for name, points in ((name, piece) for name, pieces in lines.items() for piece in pieces if piece):
        tensor, _, direction = name.partition(".")
        places = [at(*point) for point in _outermost(points)]
        dash = ' stroke-dasharray="4 3"' if direction == "col" else ""
        how = f'stroke="{LINES[tensor]}" stroke-width="1.5" stroke-linecap="round" fill="none"{dash}'
        label = f"<title>{escape(name)}</title>"
        drawn.append(
            f'<polyline points="{" ".join(places if len(places) > 1 else places * 2)}" {how}>{label}</polyline>'
        )
        if len(places) == 1:
            x, y = places[0].split(",")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{LINES[tensor]}">{label}</circle>')
    ends = (10**low, 10**high) if chart.logarithmic else (low, high)
    bottom, top = (chart.form.format(end) for end in ends)
    foot = HEIGHT - BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{chart.title}">'
        f'<text x="{LEFT}" y="9">{chart.title}</text><path class="axis" fill="none" d="M{LEFT} 14V{foot}H{WIDTH - 4}"/>'
        f'<text x="{LEFT - 3}" y="19" text-anchor="end">{top}</text>'
        f'<text x="{LEFT - 3}" y="{foot}" text-anchor="end">{bottom}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 3}">{first}</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 3}" text-anchor="end">{last}</text>{"".join(drawn)}</svg>'
    )
