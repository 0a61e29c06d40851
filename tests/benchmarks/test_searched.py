"""The benchmark that searches a policy keeps to the time between two recipes, and says what is as fast."""

from __future__ import annotations

from pathlib import Path

import pytest

import lpq
from benchmarks import searched, widened
from lpq.train import compare_config


def test_a_policy_is_searched_under_a_time_between_two_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ("nvfp4", "mxfp8-fwd-nvfp4-bwd")
    small = {**compare_config.SIZES["toy"], "layers": 1}
    monkeypatch.setattr(compare_config, "SIZES", {"toy": small})
    layers = widened.sizes(layers=1, heads=2, width=64)
    fast, slow = (widened.whole(layers, lpq.policy(name)) for name in ends)
    took = []
    for between in (0.25, 0.75):
        study = searched.Study(ends, "--seeds 1", steps=1, batches=1, recipes=("mxfp8",), between=between)
        monkeypatch.setitem(searched.STUDIES, "tried", study)
        searched.main("tried", None, "cpu", tmp_path)
        took.append(widened.whole(layers, lpq.policy(str(tmp_path / "tried.toml"))))
        assert fast < took[-1] <= (fast + between * (slow - fast)) * (1 + 1e-6)
    assert took[0] < took[1]
    said = capsys.readouterr().out
    assert f"{widened.whole(layers, None) / fast:.2f} times as fast as bf16, predicted: nvfp4\n" in said
    command = f"python -m lpq compare nvfp4 mxfp8-fwd-nvfp4-bwd {tmp_path / 'tried.toml'} --seeds 1 --out"
    assert command in said


def test_a_policy_is_beside_every_uniform_recipe_of_its_time() -> None:
    """All that have their products in these formats, and one kind of NVFP4; the others of its time mix the kinds."""
    study = searched.STUDIES["searched-between"]
    assert study.between == 1, "the time of the slowest one"
    layers = widened.sizes(layers=1, heads=2, width=64)
    took = {name: widened.whole(layers, recipe) for name, recipe in widened.composed(widened.FORMATS).items()}
    assert len(took) == len(widened.FORMATS) ** 3
    most = max(took[name] for name in study.uniform)
    within = {
        name: [part.rpartition("=")[2] for part in name.split(", ")]
        for name, seconds in took.items()
        if seconds <= most * (1 + 1e-6)
    }
    four_bits = {*widened.FOUR_BITS}
    assert {name for name, products in within.items() if len(four_bits & {*products}) == 1} == {*study.uniform}
    assert all(forward in four_bits for forward, *_ in within.values())
    assert len(within) == 16
    assert 1.02 < took["mxfp8-fwd-nvfp4-bwd"] / most < 1.04, "it falls outside, and the page says so"
