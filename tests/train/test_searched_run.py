"""``lpq search`` in what ``lpq train`` trained, and a run by the policy that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import Command
from training import MakeConfig

import lpq
import lpq.bench.search
from lpq.train import run


def test_a_run_is_searched_and_trained_by_the_policy(
    tiny: MakeConfig, console: Console, tmp_path: Path, lpq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a product in codes takes half of the time: these layers are too small to gain anything."""

    def clock(card: Any, size: Any, recipe: Any) -> float:
        return 3.0 if recipe is None else sum(1.0 if a.plain else 0.5 for a, _ in recipe.products.values())

    monkeypatch.setattr(sys.modules["lpq.bench.search"], "predicted", clock)
    config, policy = tiny(recipe="nvfp4", baseline=False), tmp_path / "policy.toml"
    run(config, console)
    given = ("search", config.out, "--recipe", "nvfp4", "--gpu", "b200", "--batches", 2, "--out", policy)
    ended = lpq_command(*given, "--time", 0.75)
    assert ended.status == 0, ended.err
    assert "Products by layer" in ended.out
    assert "this choice: 1.33 times as fast as bf16" in ended.out
    assert f"written to {policy}, for lpq train --policy {policy}" in ended.out
    assert "Nobody measured lpq on the B200: the rates are 70% of a data sheet's." in " ".join(ended.out.split())
    texts = {rule.recipe for rule in lpq.policy(policy).rules}
    assert len(texts) > 1
    again = lpq_command(*given, "--time", 0.75)
    assert (again.status, f"--out {policy} is there already" in again.err) == (2, True)
    (tmp_path / "second.toml").write_text(policy.read_text())
    policy.unlink()
    told = lpq_command(*given, "--time", 0.75, "--json")
    assert told.status == 0, told.err
    data = json.loads(told.out)
    assert data["policy"] == str(policy)
    assert len(data["remarks"]) == 1, "layers by nvfp4 were compared"
    assert data["times_as_fast"] == pytest.approx(4 / 3, rel=0.01)
    assert {one["layer"] for one in data["layers"]} >= {"blocks.0.mlp.up"}
    assert [one["recipe"] for one in data["uniform"]] == ["nvfp4"]
    assert policy.read_text() == (tmp_path / "second.toml").read_text(), "the same random bits each time"
    trained = run(tiny("by policy", policy=str(policy), baseline=False), console)
    assert trained.outcomes[0].losses[0] > 0
    for options, words in (
        ((), "search needs one budget"),
        (("--time", 1, "--recipe", "fp8-delayed"), "remembers earlier steps"),
    ):
        wrong = lpq_command(*given, *options)  # told, though the file is there already
        assert (wrong.status, words in wrong.err) == (2, True)


def test_the_baseline_of_a_run_is_searched(
    tiny: MakeConfig, console: Console, tmp_path: Path, lpq_command: Command
) -> None:
    """And leaves all layers in bf16, where that is predicted to be fastest."""
    config, policy = tiny(recipe="mxfp8", steps=1), tmp_path / "policy.toml"
    baseline = run(config, console).outcomes[1].title
    ended = lpq_command(
        "search", Path(str(config.out)) / baseline, "--error", 1, "--gpu", "b200", "--batches", 1, "--out", policy
    )
    assert ended.status == 0, ended.err
    assert [rule.recipe for rule in lpq.policy(policy).rules] == [None]
    told = " ".join(ended.out.split())
    assert "The policy leaves every layer in bf16: by these recipes none saves time" in told
    assert "for lpq train" not in told  # which refuses a policy that converts nothing


def test_a_comparison_has_no_checkpoint(tmp_path: Path, lpq_command: Command) -> None:
    (tmp_path / "mxfp8-seed0.json").touch()
    for command in (("search", tmp_path, "--time", 1, "--gpu", "b200"), ("export", tmp_path, tmp_path / "exported")):
        ended = lpq_command(*command)
        assert ended.status == 1
        assert f"{tmp_path} is of lpq compare, which keeps no checkpoint: name" in ended.err
    (tmp_path / "step-3").mkdir()  # somebody's own curves, beside checkpoints
    assert "lpq compare" not in lpq_command("export", tmp_path, tmp_path / "exported").err


def test_a_policy_that_cannot_be_written_is_told_before_the_run_is_read(tmp_path: Path, lpq_command: Command) -> None:
    given = ("search", tmp_path / "no run", "--time", 0.5, "--gpu", "b200", "--out")
    (file := tmp_path / "file").touch()
    ended = lpq_command(*given, file / "policy.toml")
    assert ended.status == 1
    assert "policy.toml cannot be written: Not a directory; choose another --out" in ended.err
    assert "cannot be written" not in lpq_command(*given, tmp_path / "new folder" / "policy.toml").err
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--time", "zzz", "--time 'zzz' is none of the recipes: choose from bf16, mxfp8, nvfp4"),
        ("--error", "mxfp9", "--error 'mxfp9' is none of the recipes: did you mean 'mxfp8'?"),
        ("--time", "nan", "--time nan: it must be a number from 0 on, or one of bf16, mxfp8, nvfp4"),
    ],
)
def test_a_wrong_budget_is_refused_as_it_was_typed(
    option: str, value: str, words: str, tmp_path: Path, lpq_command: Command
) -> None:
    """Before the run is read."""
    ended = lpq_command("search", tmp_path / "no run", option, value, "--gpu", "b200", "--out", tmp_path / "a.toml")
    assert ended.status == 2
    assert words in " ".join(ended.err.split())


def test_weights_that_are_stored_quantized_are_not_searched(
    tiny: MakeConfig, console: Console, lpq_command: Command
) -> None:
    config = tiny(recipe="mxfp8", weights="quantized", steps=1, baseline=False)
    run(config, console)
    ended = lpq_command("search", config.out, "--time", "mxfp8", "--gpu", "b200")
    assert (ended.status, "has weights that are stored quantized" in ended.err) == (2, True)
