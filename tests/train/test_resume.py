"""However a run ends before its end, resuming it gives bitwise what the uninterrupted run gives."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import processes
from rich.console import Console
from training import POLICY, MakeConfig, assert_same, saved, shown

from lpq.checkpoint import CheckpointError, info
from lpq.files import disk
from lpq.files.errors import FileError
from lpq.train import Stopped, TrainConfig, TrainError, loop, plot, report, run, runs
from lpq.train.machine import baseline_on
from lpq.train.trainer import Trainer

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def final(directory: Path, steps: int = 6) -> dict[str, Any]:
    """The last checkpoint of both models."""
    return {name: saved(directory / name, steps) for name in ("recipe", baseline_on(CPU))}


def stop_at(step: int, signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process signalled while it does this step."""
    advance = Trainer.advance

    def advance_and_signal(self: Trainer) -> dict[str, float]:
        if self.step == step:
            signal.raise_signal(signum)
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", advance_and_signal)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return str(path)


@pytest.mark.parametrize(("signum", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, 3)])
def test_a_signal_saves_and_resuming_is_bitwise(
    tiny: MakeConfig,
    policy: str,
    console: Console,
    signum: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a step of the first recipe, and in the first step of the second one."""
    whole = run(tiny("whole", policy=policy), console)
    broken = tiny("broken", policy=policy, checkpoint_every=0)
    before = signal.getsignal(signum)
    with monkeypatch.context() as patched:
        stop_at(step, signum, patched)
        with pytest.raises(
            Stopped, match=rf"after step {step + 1} of 6 \(policy\).*--resume --out .*broken"
        ) as stopped:
            run(broken, console)
    assert stopped.value.exit_code == 128 + signum
    assert signal.getsignal(signum) == before
    resumed = run(replace(broken, resume=True), console)
    assert f"resumed after step {step + 1}" in shown(console)
    a, b = (final(s.directory) for s in (whole, resumed))
    for name in a:
        for state in (a, b):
            del state[name]["beside"]["extra"]["config"]  # its directory and its checkpoint_every differ
        assert_same(a[name], b[name], name)
    assert [replace(o, seconds=0) for o in whole.outcomes] == [replace(o, seconds=0) for o in resumed.outcomes]
    lines = [json.loads(line) for line in (resumed.directory / "recipe" / runs.METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == list(whole.outcomes[0].losses)


def test_a_signal_in_the_baseline_keeps_the_recipe_done(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny("whole"), console)
    config = tiny("broken")
    run(replace(config, baseline=False), console)
    with monkeypatch.context() as patched:
        stop_at(3, signal.SIGTERM, patched)
        with pytest.raises(Stopped, match=rf"after step 4 of 6 \({baseline_on(CPU)}\)"):
            run(replace(config, resume=True, baseline=True), console)
    resumed = run(replace(config, resume=True), console)
    assert [o.held_out_loss for o in resumed.outcomes] == [o.held_out_loss for o in whole.outcomes]


NEXT = "step-00000004"


def killed(_: int, config: TrainConfig, moment: str) -> None:
    """Run in a process that is forked until it kills itself."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    advance, publish = Trainer.advance, disk.publish
    with pytest.MonkeyPatch.context() as patch:
        if moment == "in a step":
            patch.setattr(Trainer, "advance", lambda self: die() if self.step == 3 else advance(self))
        else:
            patch.setattr(disk, "publish", lambda old, new: die() if new.name == NEXT else publish(old, new))
        run(config)


@pytest.mark.parametrize("moment", ["in a step", "in saving"])
def test_a_killed_run_loses_the_steps_since_its_last_checkpoint_and_no_more(
    tiny: MakeConfig, console: Console, moment: str
) -> None:
    config = tiny("killed")
    (child,) = processes(killed, 1, config, moment, join=False).processes
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    resumed = run(replace(config, resume=True), console)
    assert "resumed after step 2" in shown(console)
    assert (f"{NEXT}.partial is refused: it was never finished" in shown(console)) == (moment == "in saving")
    whole = run(tiny("whole"), console)
    assert [o.losses for o in resumed.outcomes] == [o.losses for o in whole.outcomes]
    a, b = final(whole.directory), final(resumed.directory)
    assert_same(a["recipe"]["tensors"], b["recipe"]["tensors"])


def test_the_metrics_that_are_kept_are_in_their_file_at_every_moment(tmp_path: Path) -> None:
    """Whenever the process is killed: the file is looked at before each line of what cuts it and of the writer."""
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 1, "seconds": 0.5}\n{"step": 2, "seconds": 0.5}\n'
    lost = '{"step": 3}\n{"st'
    path.write_text(kept + lost)
    seen: list[str] = []

    def look(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code in (loop.keep.__code__, loop.add_record.__code__):
            seen.append(path.read_text())
            return look
        return None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        loop.keep(path, 2)
        loop.add_record(path, {"step": 3})
        sys.settrace(before)
        assert path.read_text() == kept + '{"step": 3}\n'
    finally:
        sys.settrace(before)
    assert len(seen) > 5
    assert seen[0] == kept + lost
    assert all(content.startswith(kept) for content in seen)


def test_metrics_that_are_broken_are_refused_before_the_next_step(tiny: MakeConfig, console: Console) -> None:
    config = tiny(baseline=False)
    folder = run(config, console).directory / "recipe"
    shutil.rmtree(folder / "step-00000006")
    (folder / "metrics.jsonl").write_text("{bad\n")
    with pytest.raises(TrainError, match=r"metrics\.jsonl, line 1, is broken \(.*\): restore it, or train anew"):
        run(replace(config, resume=True), console)
    assert "resumed after step 4" in shown(console)
    assert (folder / "metrics.jsonl").read_text() == "{bad\n"


@pytest.mark.parametrize("name", [runs.CONVERSION, f"{runs.RECIPE}/{runs.METRICS}", runs.SUMMARY, runs.PLOT])
def test_a_file_that_cannot_be_written_is_told_with_the_remedy(
    name: str, tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "draw", plot.draw)
    config = tiny(baseline=False)
    path = run(config, console).directory / name
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match=rf"{name} cannot be written: Is a directory; free space, or .* --resume"):
        run(replace(config, resume=True), console)
    path.rmdir()
    run(replace(config, resume=True), console)
    assert path.is_file()


def test_a_full_disk_ends_a_run_in_words_and_the_run_goes_on(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, add_record = Path(str(tiny().out)) / runs.RECIPE / runs.METRICS, loop.add_record
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def add_record_to_full_disk(path: Path, record: dict[str, Any]) -> None:
        if record["step"] == 4:  # a part of the line still fits
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
        try:
            add_record(path, record)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    config = tiny(baseline=False)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "add_record", add_record_to_full_disk)
        with pytest.raises(FileError, match=r"metrics\.jsonl cannot be written: File too large; free space, or"):
            run(config, console)
    run(replace(config, resume=True), console)
    assert [record["step"] for record in loop.records(path)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_says_what_made_it_and_no_other_text_or_policy_goes_on(
    tiny: MakeConfig, text: Path, policy: str, console: Console
) -> None:
    config = tiny("run", policy=policy, baseline=False)
    found = info(run(config, console).directory / "recipe")
    assert found.step == 6
    assert "scaling=delayed" in str(found.description.policies)
    assert found.extra["config"] == config.to_toml()
    assert "fp8-delayed" in found.extra["policy"] or "scaling=delayed" in found.extra["policy"]
    Path(policy).write_text(POLICY.replace("0.5", "0.6"))
    with pytest.raises(CheckpointError, match=r"(?s)the policy has changed since.*until = 0\.5"):
        run(replace(config, resume=True), console)
    Path(policy).write_text(POLICY)
    text.write_text(text.read_text().replace("squared", "cubed"))
    with pytest.raises(CheckpointError, match=r"text\.txt\) has changed since"):
        run(replace(config, resume=True), console)
