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
