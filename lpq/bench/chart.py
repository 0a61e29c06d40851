"""The map of speed-ups as SVG: a panel for each recipe, tokens downwards and widths to the right."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lpq.bench.speedups import Measured, grid, recipes_of

MARGIN, SIDE, WIDE, HIGH, GAP = 16, 64, 58, 30, 28
LEAST, MOST = 0.5, 1.8
"""The speed-ups of the strongest colours; 1 has none."""
STYLE = """
svg { --back: #ffffff; --edge: #d8dde6; --ink: #1f2937; --soft: #5b6675; --gain: #2563a8; --loss: #c2570c; }
@media (prefers-color-scheme: dark) {
  svg { --back: #1e2430; --edge: #3a4252; --ink: #e6e9ef; --soft: #a9b2c0; --gain: #3f8ae0; --loss: #e07a2f; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .back { fill: var(--back); stroke: var(--edge); }
.gain { fill: var(--gain); } .loss { fill: var(--loss); }
"""


def svg(shapes: Sequence[Measured], title: str) -> str:
    """The chart, for light and dark pages."""
    parts: list[str] = []
    x0, high = float(MARGIN), 0.0
    for recipe in recipes_of(shapes):
        tokens, widths, rows = grid(shapes, recipe)
        parts += _panel(x0, MARGIN + 22, recipe, tokens, widths, rows)
        x0 += SIDE + WIDE * len(widths) + GAP
        high = MARGIN + 22 + 40 + HIGH * len(tokens) + MARGIN
    wide = max(x0 - GAP + MARGIN, 2 * MARGIN + 6.3 * len(title))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" role="img">'
    back = f'<rect class="back" x="0.5" y="0.5" width="{wide - 1:.0f}" height="{high - 1:.0f}" rx="8"/>'
    heading = _text(MARGIN, MARGIN + 10, title, "soft", "start")
    return "\n".join([head, f"<style>{STYLE}</style>", back, heading, *parts, "</svg>"]) + "\n"


def _panel(
    x0: float,
    top: float,
    recipe: str,
    tokens: Sequence[int],
    widths: Sequence[int],
    rows: Sequence[Sequence[float | None]],
) -> list[str]:
    parts = [_text(x0 + SIDE, top + 14, f"{recipe}: width →", "", "start")]
    parts += [_text(x0 + SIDE - 8, top + 32, "tokens ↓", "soft", "end")]
    for x, width in enumerate(widths):
        parts.append(_text(x0 + SIDE + WIDE * (x + 0.5), top + 32, f"{width:,}", "soft"))
    for y, (count, values) in enumerate(zip(tokens, rows, strict=True)):
        at = top + 40 + HIGH * y
        parts.append(_text(x0 + SIDE - 8, at + 19, f"{count:,}", "soft", "end"))
        for x, value in enumerate(values):
            parts.append(_cell(x0 + SIDE + WIDE * x, at, value))
    return parts


def _cell(x: float, y: float, value: float | None) -> str:
    label = _text(x + WIDE / 2, y + 19, "–" if value is None else f"{value:.2f}", "")
    if value is None:
        return label
    strength = (value - 1) / (MOST - 1) if value >= 1 else (1 - value) / (1 - LEAST)
    kind = "gain" if value >= 1 else "loss"
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{WIDE - 2}" height="{HIGH - 2}" rx="3"'
    return f'<rect class="{kind}" fill-opacity="{0.75 * min(strength, 1):.2f}" {box}/>{label}'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="12.5" text-anchor="{anchor}">{escape(text)}</text>'
