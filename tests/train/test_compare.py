"""A comparison trains each recipe and bf16 from the same seeds, goes on where it was cut off, and counts every seed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forking import Ended, command
from rich.console import Console
from support.commands import Command
from torchrun import faulty, run_forked
from training import shown

from lpq.train import Stopped, TrainError, beside, compare, data, gaps, loop, trainings
from lpq.train.compare_config import CompareConfig, count, training
from lpq.train.machine import baseline_on
from lpq.train.plot import draw
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

BASELINE = baseline_on(torch.device("cpu"))
Make = Callable[..., CompareConfig]


@pytest.fixture
def small(tmp_path: Path, text: Path) -> Make:
    """Comparisons of a model with 7 thousand weights, two seeds and six steps."""

    def make(
        *recipes: str, out: str = "out", seeds: int = 2, at_once: int = 1, limit: float | None = None, steps: int = 6,
        **options: Any,
    ) -> CompareConfig:  # fmt: skip
        size = {"layers": 1, "heads": 1, "width": 16, "seq": 16, "batch": 2, "data": (str(text),), "device": "cpu"}
        every = {"validate_every": 4, "checkpoint_every": 4}
        settings = training("toy", str(steps * 32), {**size, **every, **options})
        return CompareConfig(recipes, seeds, settings, tmp_path / out, at_once, limit)

    return make


def losses(found: list[Training]) -> dict[tuple[str, int], Any]:
    return {(t.title, t.seed): (tuple(t.losses), tuple(map(tuple, t.held_out))) for t in found}


def test_recipes_and_the_baseline_are_trained_from_the_same_seeds(small: Make, console: Console) -> None:
    config = small("mxfp8", "nvfp4-late-switch")
    found = compare.run(config, console)
    assert [(t.title, t.seed) for t in found] == [
        (title, seed) for title in (BASELINE, "mxfp8", "nvfp4-late-switch") for seed in (0, 1)
    ]
    for t in found:
        assert len(t.losses) == 6
        assert [step for step, _ in t.held_out] == [4, 6]
        assert t.baseline == (t.title == BASELINE)
        start = next(b.losses[0] for b in found if b.baseline and b.seed == t.seed)
        assert t.losses[0] == pytest.approx(start, rel=1e-2)  # the same weights and the same batch
    assert found[0].losses != found[1].losses
    assert len({tuple(t.losses) for t in found}) == 6
    assert sorted(path.name for path in config.out.iterdir()) == sorted(
        f"{title}-seed{seed}.json" for title in (BASELINE, "mxfp8", "nvfp4-late-switch") for seed in (0, 1)
    )
    before = {path: path.stat().st_mtime_ns for path in config.out.iterdir()}
    assert losses(compare.run(config, console)) == losses(found)
    assert {path: path.stat().st_mtime_ns for path in config.out.iterdir()} == before  # nothing is repeated


def test_a_policy_is_tried_on_the_model_once_however_many_trainings_it_has(
    small: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    check = loop.policy_of
    monkeypatch.setattr(loop, "policy_of", lambda config: tried.append(config.policy) or check(config))
    assert len(compare.run(small("mxfp8", steps=1), console)) == 4
    assert tried == ["mxfp8"]


class Killed(BaseException):
    """What ends a process in the tests below without a chance to save anything."""


@pytest.mark.parametrize("how", ["stopped", "killed", "down"])
def test_a_comparison_that_was_cut_off_goes_on_bitwise(
    how: str, small: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second training; and curves alone suffice for the trainings that ended. A machine that went down may have
    a checkpoint on its disk, and not the lines of the last steps before it: the curve has them all the same."""
    whole = compare.run(small("mxfp8", out="whole", seeds=1), console)
    config, advance = small("mxfp8", out="broken", seeds=1), Trainer.advance

    def advance_to_an_end(self: Trainer) -> dict[str, float]:
        if self.policy is not None and how == "stopped" and self.step == 3:
            signal.raise_signal(signal.SIGTERM)
        if self.policy is not None and self.step == 5:
            raise Killed
        return advance(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "advance", advance_to_an_end)
        with pytest.raises((Stopped, Killed)) as ended:
            compare.run(config, console)
    if how == "stopped":
        assert "1 trainings are left, and the same command goes on" in str(ended.value)
        assert isinstance(ended.value, Stopped)
        assert ended.value.exit_code == 128 + signal.SIGTERM
    assert [path.name for path in config.unfinished.iterdir()] == ["mxfp8-0"]
    if how == "down":
        metrics = config.unfinished / "mxfp8-0" / "recipe" / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
        found = compare.run(config, console)
        assert [(one.losses, one.result) for one in found] == [(one.losses, one.result) for one in whole]
        return
    assert losses(compare.run(config, console)) == losses(whole)
    assert "mxfp8, seed 0: resumed after step 4" in shown(console)
    assert not config.unfinished.exists()
    (config.out / "mxfp8-seed0.json").unlink()
    assert losses(compare.run(replace(config, recipes=("mxfp8", "identity")), console)).items() > losses(whole).items()


def test_no_training_begins_when_the_time_is_up(small: Make, console: Console) -> None:
    config = small("mxfp8", limit=0.0)
    assert compare.run(config, console) == []
    assert "the time is up: 4 trainings are left" in shown(console)


def test_the_time_limit_counts_what_comes_before_the_first_step(
    small: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, load = [100.0], data.load

    def slowly(*arguments: Any) -> data.Text:
        now[0] += 60
        return load(*arguments)

    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(data, "load", slowly)
    assert compare.run(small("mxfp8", limit=50.0), console) == []
    assert compare.run(small("mxfp8", limit=100.0), console, began=50.0) == []
    assert "4 trainings are left" in shown(console)
    assert len(compare.run(small("mxfp8", limit=1000.0), console)) == 4


@pytest.mark.starts
def test_processes_cut_off_by_the_time_limit_go_on_bitwise_in_a_folder_that_was_moved(
    small: Make, console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Several at once have the results that one after the other has."""
    long: dict[str, Any] = {"steps": 120, "checkpoint_every": 0, "validate_every": 60}
    whole = compare.run(small("mxfp8", out="whole", seeds=1, **long), console)
    cut = small("mxfp8", out="cut", seeds=1, at_once=2, limit=3600.0, **long)
    now, in_process = [0.0], compare._in_process

    def until_a_step_is_done(job: Any, context: Any, ends: Any, console: Console, show: Any) -> None:
        def show_and_end(record: dict[str, Any]) -> None:
            show(record)
            now[0] = 3600.0

        in_process(job, context, ends, console, show_and_end)

    with monkeypatch.context() as patched:
        patched.setattr(compare, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patched.setattr(compare, "_in_process", until_a_step_is_done)
        patched.setattr(compare, "PATIENCE", 0.01)  # or a fast machine would be done
        assert compare.run(cut, console) == []
    assert sorted(path.name for path in cut.unfinished.iterdir()) == sorted(f"{t}-0" for t in (BASELINE, "mxfp8"))
    assert "the time is up: 2 trainings are left" in shown(console)
    cut.out.rename(tmp_path / "elsewhere")
    found = compare.run(small("mxfp8", out="elsewhere", seeds=1, at_once=2, **long), console)
    assert losses(found) == losses(whole)
    resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", shown(console))]
    assert len(resumed) == 2
    assert 0 < max(resumed) < 120
    assert "2 at a time" in shown(console)
    assert not (tmp_path / "elsewhere" / "unfinished").exists()


def test_what_is_there_of_other_settings_is_refused_in_words(
    small: Make, console: Console, text: Path, tmp_path: Path, lpq_command: Command
) -> None:
    policy, out = tmp_path / "mine.toml", tmp_path / "out"
    policy.write_text('rules = [{match = "*.up", recipe = "mxfp8"}]')
    size = {"layers": 1, "heads": 1, "width": 16, "seq": 16, "batch": 2, "data": text, "tokens": 192}
    options = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    every = ("--validate-every", "4", "--at-once", "1", "--device", "cpu")
    ended = lpq_command("compare", policy, *options, *every, "--seeds", "1", "--out", out)
    assert ended.status == 0, ended.err
    asked = json.loads((out / "mine-seed0.json").read_text())["command"]
    assert asked.startswith(f"python -m lpq compare {policy} ")
    assert "--tokens 192" in asked
    assert "--out" not in asked
    assert len(compare.run(small(str(policy), seeds=1), console)) == 2
    with pytest.raises(TrainError, match=r"seed0\.json is of a training with lr = 0\.004, and lr = 0\.1 is asked for"):
        compare.run(small("mxfp8", lr=0.1), console)
    with pytest.raises(TrainError, match=r"with steps = 6, and steps = 7 is asked for.* Give --tokens 192, or"):
        compare.run(small("mxfp8", steps=7), console)
    policy.write_text('rules = [{match = "*.down", recipe = "mxfp8"}]')
    with pytest.raises(TrainError, match=r"(?s)mine is another recipe than the trainings that are there.*\*\.up"):
        compare.run(small(str(policy)), console)
    text.write_text(text.read_text().replace("squared", "cubed"))
    with pytest.raises(TrainError, match=r"seed0\.json was trained on another text"):
        compare.run(small("mxfp8"), console)
    (out / "x-seed0.json").write_text("{}")
    with pytest.raises(TrainError, match=r"x-seed0\.json is no curve of lpq compare .*: move it away"):
        compare.run(small("mxfp8"), console)


def test_what_is_asked_for_wrongly_is_refused_before_anything_is_written(lpq_command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, words in (
        (("mxfp9",), "mxfp9"),
        (("mxfp8", "--size", "60g"), "did you mean '60m'"),
        (("mxfp8", "--tokens", "many"), "a number of tokens is wanted"),
        (("mxfp8", "--tokens", "511"), "tokens = 511: a step reads 512, --batch times --seq: give 512 or more"),
        (("mxfp8", "--seeds", "0"), "it must be at least 1"),
        (("mxfp8", "--record"), "--record makes CUDA graphs, and the device is cpu: leave it out"),
        (("mxfp8", "mxfp8"), "name each recipe once"),
        ((BASELINE,), "is what every recipe is compared with"),
        (("mxfp8", "--beside", "mxfp9"), "--beside mxfp9: no training is by it: did you mean 'mxfp8'"),
        (("mxfp8", "nvfp4-pretrain", "--layers", "1"), "nvfp4-pretrain converts no layer of a model of layers = 1"),
        (("mxfp8", "--schedule", "cosin"), "did you mean 'cosine'"),
        ((), "--device would change nothing: without a recipe the command tells what is in --out"),
        (("--seeds", "5"), "--seeds, --device would change nothing"),
    ):
        ended = lpq_command("compare", *arguments, "--out", out, "--device", "cpu")
        assert ended.status in (1, 2)
        assert words in ended.err
    ended = lpq_command("compare", "--out", out)
    assert (ended.status, "nothing to compare with yet. Name recipes to train" in ended.err) == (1, True)
    assert not out.exists()


def test_a_folder_that_is_another_s_or_cannot_be_written_is_refused_at_once(
    small: Make, console: Console, tmp_path: Path
) -> None:
    config = small("mxfp8")
    config.out.mkdir()
    (config.out / "config.toml").touch()
    with pytest.raises(TrainError, match="holds a run of lpq train: name another directory"):
        compare.run(config, console)
    (config.out / "config.toml").unlink()
    config.unfinished.touch()  # a file lies where the folder would be made
    with pytest.raises(TrainError, match=r"nothing can be kept in .*unfinished: File exists; name another --out"):
        compare.run(config, console)
    assert shown(console) == ""


def test_of_two_commands_in_one_folder_the_second_is_refused_and_a_killed_one_is_not_in_the_way(
    small: Make, console: Console
) -> None:
    config = small("mxfp8", limit=0.0)
    reading, writing = os.pipe()
    if not (other := os.fork()):
        try:
            with compare._only(config.out):
                os.write(writing, b"taken")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 5) == b"taken"
        with pytest.raises(TrainError, match=rf"process {other} on .* runs lpq compare in .*out at this moment: wait"):
            compare.run(config, console)
        assert shown(console) == ""
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert [path.name for path in config.out.glob("*.partial")] == ["comparing.partial"]
    assert compare.run(config, console) == []
    assert not [*config.out.iterdir()]


@pytest.mark.starts
def test_the_processes_of_torchrun_share_the_trainings_out(text: Path, tmp_path: Path) -> None:
    """Each takes what no other took. The files are one process's own but for times; what fails on one is reported, the
    rest is done, and the same command does what is left."""
    size = {"layers": 1, "heads": 1, "width": 16, "seq": 16, "batch": 2, "data": text, "tokens": 192, "device": "cpu"}
    options = [str(word) for name, value in size.items() for word in (f"--{name}", value)]
    words = ["lpq", "compare", "mxfp8", "identity", *options, "--seeds", "2", "--validate-every", "4", "--out"]

    def files(folder: str) -> dict[str, Any]:
        found = {path.name: json.loads(path.read_text()) for path in (tmp_path / folder).glob("*.json")}
        for file in found.values():
            del file["date"], file["step_seconds"]
        return found

    def ranks(folder: str, fault: str = "pass", *more: str) -> Ended:
        return run_forked(2, [*words, str(tmp_path / folder), *more], faulty(fault))

    assert command(*words[1:], str(tmp_path / "whole"), "--at-once", "1").status == 0
    own = """
    if self.step == 0:
        print("rank", RANK, "trains", flush=True)
    if self.policy is not None and self.config.seed == 1 and self.step == 3:
        raise RuntimeError("out of luck")
    time.sleep(0.05)
    """
    ended = ranks("shared", own)
    assert ended.statuses == (1, 1), ended.err
    assert "6 trainings of 6 steps of 32 bytes, 0 of them done, 2 at a time" in ended.out
    assert "rank 0 trains" in ended.out
    assert "rank 1 trains" in ended.out
    for title in ("mxfp8", "identity"):
        assert ended.out.count(f"failed: {title}, seed 1: RuntimeError: out of luck") == 1
    assert ended.err.count("Trainings that ended are kept, and the same command does the rest") == 1
    assert sorted(files("shared")) == sorted([*(f"{t}-seed0.json" for t in (BASELINE, "mxfp8", "identity")),
                                              f"{BASELINE}-seed1.json"])  # fmt: skip
    ended = ranks("shared")
    assert ended.statuses == (0, 0), ended.err
    assert "6 trainings of 6 steps of 32 bytes, 4 of them done, 2 at a time" in ended.out
    assert files("shared") == files("whole")
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    ended = ranks("shared", "pass", "--at-once", "2")
    assert ended.statuses == (1, 1)
    assert ended.err.count("--at-once is not for torchrun") == 1


def test_a_training_that_diverges_is_counted(small: Make, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed does not vanish from the table."""
    loss = Trainer.loss

    def overflowing(self: Trainer, *batch: Any) -> Any:
        return loss(self, *batch) * (math.inf if self.policy and self.config.seed and self.step == 3 else 1)

    monkeypatch.setattr(Trainer, "loss", overflowing)
    found = compare.run(small("mxfp8"), console)
    (diverged,) = (t for t in found if t.diverged is not None)
    assert (diverged.title, diverged.seed, len(diverged.losses)) == ("mxfp8", 1, 3)
    assert "step 4 has a loss of inf" in str(diverged.diverged)
    (row,) = (g for g in gaps.gaps(found) if g.title == "mxfp8")
    assert (row.mean, row.verdict, row.seeds) == (None, "1 diverged", 2)
    assert len(compare.run(small("mxfp8"), console)) == 4


# ---------------------------------------------------------------------------------------------- what files give


def made(title: str, *results: float, folder: Path | None = None) -> list[Training]:
    """Trainings with these results."""
    settings = {**trainings.shared(training("toy", None, {}))}
    found = [
        Training(
            title=title, seed=seed, policy="" if title == "bf16" else "x", settings=settings, source="text", text="0",
            losses=[4.0 - 0.01 * i + result for i in range(100)], held_out=[(100, result)], diverged=None,
            step_seconds=0.5, machine={"device": "CPU"}, command="", date="2026-11-27",
        )
        for seed, result in enumerate(results)
    ]  # fmt: skip
    for t in found if folder is not None else ():
        t.write(folder)  # type: ignore[arg-type]
    return found


def test_gaps_are_paired_and_their_interval_is_student_s() -> None:
    """The spread of the seeds, ten times the gap, is not in the gap; the interval is scipy's, by ttest_1samp."""
    rows = gaps.gaps([*made("a", 1.01, 1.111, 0.9072), *made("bf16", 1.0, 1.1, 0.9), *made("b", 1.0, 1.2, 0.7)])
    assert [row.title for row in rows] == ["bf16", "b", "a"]
    base, b, a = rows
    assert a.mean == pytest.approx((0.01 + 0.01 + 0.008) / 3)
    assert a.spread == pytest.approx(0.0011547, rel=1e-4)
    assert a.half == pytest.approx(4.3027 * 0.0011547 / 3**0.5, rel=1e-4)
    assert a.verdict == "worse"
    assert b.verdict == "nothing"
    assert base.mean is None
    assert base.spread == pytest.approx(0.1)
    assert base.tokens_per_second == 8 * 64 / 0.5
    (_, one) = gaps.gaps([*made("bf16", 1.0, 1.1), *made("a", 1.01)])
    assert (one.seeds, one.half, one.verdict) == (1, None, "nothing")
    assert gaps.gaps(made("a", 1.0)) == []


@pytest.mark.filterwarnings("ignore:lpq.convert")
def test_a_recipe_that_trained_as_the_baseline_does_is_told(
    small: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in files of earlier versions, which trained policies that convert no layer. One other loss suffices."""
    monkeypatch.setattr(loop, "policy_of", lambda config: loop.lpq.policy(config.policy))
    found = compare.run(small("nvfp4-pretrain", "mxfp8"), console)
    rows = {row.title: row for row in gaps.gaps(found)}
    assert [row.identical for row in (rows[BASELINE], rows["mxfp8"])] == [False, False]
    assert (rows["nvfp4-pretrain"].mean, rows["nvfp4-pretrain"].verdict) == (0, "identical")
    other = [replace(t, losses=[*t.losses[:-1], 9.0]) if t.title == "nvfp4-pretrain" and t.seed else t for t in found]
    assert {row.title: row.verdict for row in gaps.gaps(other)}["nvfp4-pretrain"] == "nothing"


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (30, 2.042), (31, 2.040), (60, 2.000), (120, 1.980)])
def test_the_quantile_of_student_is_that_of_printed_tables(freedom: int, quantile: float) -> None:
    assert gaps.student(freedom) == pytest.approx(quantile, abs=1e-3)


def test_recipes_beside_another_one_and_the_part_of_its_gap_that_they_close() -> None:
    """Half of the gap, but for 0.001 more or less; the error of the share was simulated."""
    base, gap = (1.0, 1.1, 0.9, 1.2), (0.02, 0.024, 0.018, 0.022)
    found = [*made("bf16", *base), *made("nvfp4", *(b * (1 + g) for b, g in zip(base, gap, strict=True)))]
    left = [g / 2 + e for g, e in zip(gap, (0.001, -0.001, 0.001, -0.001), strict=True)]
    found += made("half", *(b * (1 + one) for b, one in zip(base, left, strict=True)))
    found += made("all", *base) + made("alone", 1.0)
    half, nothing_left = beside.closed(found, "half", "nvfp4"), beside.closed(found, "all", "nvfp4")
    assert half is not None
    assert half.share == pytest.approx(0.5)
    drawn = torch.randint(4, (20_000, 4), generator=torch.Generator().manual_seed(0))
    means = [torch.tensor(each, dtype=torch.float64)[drawn].mean(1) for each in (left, gap)]
    spread = float((1 - means[0] / means[1]).std()) * (4 / 3) ** 0.5  # which a sample of four has too little of
    assert half.half == pytest.approx(gaps.student(3) * spread, rel=0.1)
    assert nothing_left == beside.Closed(1.0, 0.0)
    assert beside.closed(found, "alone", "nvfp4") is None
    assert beside.closed(found, "nvfp4", "all") is None, "which has no gap to close"
    two = [t for t in found if t.seed < 2]
    assert {gap.title: gap.verdict for gap in gaps.gaps(two)}["nvfp4"] == "nothing"
    assert beside.closed(two, "half", "nvfp4") is None, "two seeds do not show a gap"
    rows = {row[0]: row for row in beside.rows(found, "nvfp4")}
    assert list(rows) == ["all", "bf16", "alone", "half"]
    assert rows["half"] == ("half", "4", "-1.03 %", "0.37 %", "50 %", "9 %", "6")
    assert rows["bf16"][4:6] == ("", "")
    assert beside.rows(found, "mxfp8") == []
    (gap_of_half,) = (g for g in beside.beside(found, "nvfp4") if g.title == "half")
    assert rows["half"][3] == gap_of_half.cells()[4], "as in the main table"
    differences = [(1 + one) / (1 + g) - 1 for one, g in zip(left, gap, strict=True)]
    assert gap_of_half.mean == pytest.approx(sum(differences) / 4)


def test_columns_that_are_not_in_the_table_are_not_explained(tmp_path: Path, lpq_command: Command) -> None:
    made("bf16", 1.0, folder=tmp_path)
    made("nvfp4", 1.02, folder=tmp_path)
    said = lpq_command("compare", "--out", tmp_path, "--beside", "nvfp4").out
    assert "Gap: by how much" in said
    assert not any(head in said for head in ("± 95 %", "Spread", "Closes", "last column", "Seeds for", "is not told"))
    made("mxfp8", 1.01, folder=tmp_path)
    said = " ".join(lpq_command("compare", "--out", tmp_path, "--beside", "nvfp4").out.split())
    assert "the gap of nvfp4 the others close is not told" in said


def test_a_figure_and_a_table_are_made_of_curves_alone(tmp_path: Path, lpq_command: Command) -> None:
    pytest.importorskip("matplotlib")
    made("bf16", 1.0, 1.1, folder=tmp_path)
    made("nvfp4", 1.02, 1.13, folder=tmp_path)
    ended = lpq_command("compare", "--out", tmp_path)
    assert ended.status == 0
    assert "+2.36 %" in ended.out
    assert "interval of this mean by Student's t" in " ".join(ended.out.split())
    table = (tmp_path / "table.md").read_text()
    assert table == gaps.markdown(trainings.read_all(tmp_path)) + "\n"
    assert "| nvfp4 | 2 | 1.0750 | +2.36 % | 4.62 % | nothing | 0.51 % |" in table
    ended = lpq_command("compare", "--out", tmp_path, "--beside", "nvfp4")
    assert "Beside nvfp4" in ended.out
    assert "Seeds for 0.2 %: with this number" in " ".join(ended.out.split())
    both = (tmp_path / "table.md").read_text()
    assert both == table + "\n" + beside.markdown(trainings.read_all(tmp_path), "nvfp4") + "\n"
    ended = lpq_command("compare", "--out", tmp_path, "--beside", "nvfp8")
    assert (ended.status, "--beside nvfp8: no training is by it: did you mean 'nvfp4'" in ended.err) == (2, True)
    figure = (tmp_path / "compare.svg").read_text()
    assert "gap to bf16 of the same seed (%)" in figure
    assert "mean of 2 seeds" in figure
    draw(trainings.read_all(tmp_path), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == figure
    assert json.loads((tmp_path / "bf16-seed0.json").read_text())["held_out"] == [[100, 1.0]]


def test_a_schedule_warms_up_and_decays_to_a_tenth(small: Make) -> None:
    from types import SimpleNamespace as Space

    def rates(schedule: str) -> list[float]:
        config = replace(small().training, steps=100, schedule=schedule, warmup=0.1, lr=1.0)
        return [Trainer.learning_rate(Space(config=config, step=step)) for step in range(100)]  # type: ignore[arg-type]

    cosine, wsd = rates("cosine"), rates("wsd")
    assert cosine[:10] == wsd[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert wsd[10:81] == [1.0] * 71
    assert wsd[90] == pytest.approx(0.55)
    assert cosine[55] == pytest.approx(0.55)
    assert 0.1 < cosine[99] < 0.11
    assert 0.1 < wsd[99] < 0.15


@pytest.mark.parametrize(("text", "number"), [("200M", 200_000_000), ("1.5k", 1500), ("7", 7), ("1G", 10**9)])
def test_tokens_are_counted(text: str, number: int) -> None:
    assert count(text) == number


def test_a_size_is_what_it_is_called() -> None:
    from lpq.train.compare_config import SIZES
    from lpq.train.model import GPT, GPTShape

    for name, settings in SIZES.items():
        if name == "toy":
            continue
        with torch.device("meta"):
            model = GPT(GPTShape(settings["layers"], settings["heads"], settings["width"]))
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        assert millions == pytest.approx(float(name[:-1]), rel=0.07)
