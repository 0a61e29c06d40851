"""A run ends in words: its gap beside what another seed changes, and what the times of a CPU mean."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from rich.console import Console
from training import MakeConfig, shown

from lpq.bench import measured
from lpq.train import loop, plot, run, runs
from lpq.train.conclusion import beside_seeds, conclusion
from lpq.train.plot import Curve

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / measured.LLAMA


def told(recipe: float, bf16: float, other: float | None = None) -> str:
    return beside_seeds("mxfp8", "bf16", recipe / bf16 - 1, None if other is None else other / bf16 - 1)


def test_a_gap_within_what_a_seed_changes_shows_no_effect() -> None:
    words = told(2.02, 2.0, 1.94)
    assert words.startswith("mxfp8 ends 1.00% above bf16 in loss on text that was held out. ")
    assert "bf16 with another seed ends 3.00% below it: a seed alone changes the loss by at least as much" in words
    assert "lpq compare" in words


def test_a_gap_beyond_what_a_seed_changes_is_said() -> None:
    words = told(1.92, 2.0, 2.02)
    assert "mxfp8 ends 4.00% below bf16" in words
    assert "ends 1.00% above it: the gap is 4.0 times what the seed changes" in words


def test_a_seed_that_changes_nothing_hides_no_gap() -> None:
    assert "the seed changes nothing, and the recipe does" in told(2.02, 2.0, 2.0)
    assert "no effect" in told(2.0, 2.0, 2.0)


def test_without_trainings_to_compare_nothing_is_concluded() -> None:
    assert conclusion(["mxfp8"], None, None, on_cpu=False) == []
    words = "mxfp8 ends 1.00% above bf16 in loss on text that was held out."
    assert conclusion(["mxfp8", "bf16"], 0.01, None, on_cpu=False) == [words]


def test_on_a_cpu_times_are_emulation_s_and_the_gain_is_what_was_measured() -> None:
    found = json.loads(RESULTS.read_text())
    speed = {
        row["library"]: row["tokens_per_second"]
        for row in found["results"]
        if row["compiled"] and row["recipe"] in ("bf16", "fp8-current")
    }
    (words,) = conclusion(["mxfp8"], None, None, on_cpu=True)
    assert "low precision is emulated" in words
    assert f"{speed['lpq'] / speed['torch']:.2f} times as fast as bf16" in words
    assert found["environment"]["device"] in words
    assert found["environment"]["date"][:10] in words


def test_the_gain_is_read_from_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = json.loads(RESULTS.read_text())
    for row in found["results"]:
        if row["library"] == "lpq":
            row["tokens_per_second"] *= 2
    (tmp_path / measured.LLAMA).write_text(json.dumps(found))
    before = measured.gain("fp8-current")
    monkeypatch.setattr(measured, "results", lambda name: tmp_path / name)
    after = measured.gain("fp8-current")
    assert before is not None
    assert after is not None
    assert after.times_as_fast == 2 * before.times_as_fast
    assert measured.gain("mxfp8") is None  # it was not measured


def test_the_second_seed_is_the_baseline_alone_and_can_be_left_out(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[tuple[int, bool]] = []
    original = loop.Trainer

    def noted(config: Any, text: Any, policy: Any, team: Any) -> Any:
        policies.append((config.seed, policy is not None))
        return original(config, text, policy, team)

    monkeypatch.setattr(loop, "Trainer", noted)
    done = run(tiny("two", recipe="fp8-current", steps=2, seed=4, second_seed=True), console)
    assert policies == [(4, True), (4, False), (5, False)]
    recipe, bf16, other = done.outcomes
    assert done.seed_distance == other.held_out_loss / bf16.held_out_loss - 1 != 0
    assert done.gap == recipe.held_out_loss / bf16.held_out_loss - 1
    assert json.loads((done.directory / "summary.json").read_text())["seed_distance"] == done.seed_distance
    assert f"{bf16.title} with another seed ends {abs(done.seed_distance):.2%}" in " ".join(shown(console).split())
    assert (done.directory / f"{bf16.title}{runs.SECOND}").is_dir()
    one = run(tiny("one", recipe="fp8-current", steps=2, seed=4), console)
    assert [o.losses for o in one.outcomes] == [recipe.losses, bf16.losses]
    assert one.seed_distance is None


def test_what_a_seed_changes_is_a_band_in_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made: list[Any] = []
    original = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (original(self, *a, **k), made.append(self)))
    recipe = Curve("mxfp8", 0, [2.01] * 100)
    baseline, other = (Curve("bf16", seed, [2.0 + 0.1 * seed] * 100, baseline=True) for seed in (0, 1))
    for curves in ([recipe, baseline, other], [recipe, baseline], [recipe]):
        assert plot.draw(curves, tmp_path / "loss.png") == "loss.png"
    with_band, without = (figure.axes[1] for figure in made[:2])
    (filled,) = with_band.collections
    ends = (filled.get_datalim(with_band.transData).y0, filled.get_datalim(with_band.transData).y1)
    spread = 100 * stdev((2.0, 2.1)) / 2.05
    assert ends == pytest.approx((-spread, spread))
    assert not without.collections
    assert with_band.get_ylim()[1] > spread > without.get_ylim()[1]
    assert "its standard deviation over seeds" in made[0].legends[0].get_texts()[0].get_text()
    assert len(made[2].axes) == 1, "without a baseline there is no gap"
