"""The curves of the plot do not lag, and its labels are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from lpq.train.plot import Curve, draw, smooth


def test_a_straight_line_stays_where_it_is() -> None:
    line = [5 - 0.01 * step for step in range(1, 301)]
    steps, means = smooth(line)
    assert (steps[0], steps[-1], len(steps)) == (8, 293, 286)
    assert means == pytest.approx([line[step - 1] for step in steps], abs=1e-9)
    assert means != pytest.approx([line[step - 2] for step in steps], abs=1e-9)  # a lag of a step is seen


def test_a_short_run_has_its_own_losses() -> None:
    assert smooth([3.0, 1.0]) == ([1, 2], [3.0, 1.0])
    assert smooth([]) == ([], [])


def test_many_long_labels_stand_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = []
    original = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (original(self, *a, **k), made.append(self)))
    titles = [
        f"x=nvfp4(block=16x16, rht=true), w=mxfp8(dtype=e4m3), dy=fp8(scaling=block), wgrad=${i}$" for i in range(12)
    ]
    curves = [Curve(title, 0, [2 + 1 / (i + step) for step in range(1, 40)]) for i, title in enumerate(titles)]
    curves.append(Curve("bf16", 0, [2 + 1 / step for step in range(1, 40)], baseline=True))
    assert draw(curves, tmp_path / "loss.png") == "loss.png"
    (figure,) = made
    losses, gaps = figure.axes
    shown = [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
    assert shown == ["bf16, mean of 1 seed", *titles]
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= losses.get_window_extent().y1  # no curve lies under a label
    assert losses.get_window_extent().height > gaps.get_window_extent().height > 100
    assert gaps.get_ylabel() == "gap to bf16 of the same seed (%)"
    for panel in figure.axes:
        lines = [line for line in panel.get_lines() if len(line.get_xdata()) > 2]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) >= len(titles)
