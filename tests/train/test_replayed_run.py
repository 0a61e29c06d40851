"""``lpq train --replay`` and ``--promote``: a step that leaves its course is replayed, and layers are promoted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training import MakeConfig, assert_same, saved, shown

import lpq
import lpq.observe.trigger
from lpq.observe import Course
from lpq.train import run
from lpq.train.errors import Diverged
from lpq.train.trainer import Trainer


class OffInThird(Course):
    """A course that the third step leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def off(self, loss: float, norm: float | None = None) -> str | None:
        self.steps += 1
        return super().off(loss, norm) or ("planted" if self.steps == 3 else None)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpq.observe.trigger, "Course", OffInThird)


def records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "recipe" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.usefixtures("planted")
def test_a_step_is_replayed_and_the_run_goes_on_as_it_would(tiny: MakeConfig, console: Console, tmp_path: Path) -> None:
    plain = run(tiny("plain", recipe="nvfp4", baseline=False), console)
    replayed = run(tiny("replayed", recipe="nvfp4", baseline=False, replay=True), console)
    assert replayed.outcomes[0].losses == plain.outcomes[0].losses
    said = shown(console)
    assert "step 3: planted" in said
    assert "%  blocks.0" in said
    assert "Steps that stay off the course are not replayed again" in said
    found = [record["step"] for record in records(replayed.directory) if "replay" in record]
    assert found == [3]  # records count the steps that are done


@pytest.mark.usefixtures("planted")
def test_culprits_are_promoted_and_a_resumed_run_goes_on_with_the_rule(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"recipe": "nvfp4", "baseline": False, "promote": 2, "checkpoint_every": 1}
    plain = run(tiny("plain", recipe="nvfp4", baseline=False), console)
    whole = run(tiny("whole", **options), console)
    assert "They are in bf16 in steps 4 to 5" in shown(console)
    assert whole.outcomes[0].losses[:3] == plain.outcomes[0].losses[:3]
    assert whole.outcomes[0].losses[3] != plain.outcomes[0].losses[3]
    policy = lpq.checkpoint.info(whole.directory / "recipe").policy
    assert policy.rules[0].until == 5
    assert "They are in bf16 in steps 4 to 5" in records(whole.directory)[2]["replay"]

    cut = tiny("cut", **options)
    with monkeypatch.context() as context:
        advance = Trainer.advance

        def stopping(self: Trainer) -> Any:
            if self.step == 4:
                raise KeyboardInterrupt
            return advance(self)

        context.setattr(Trainer, "advance", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(cut, console)
    resumed = run(tiny("cut", **options, resume=True), console)
    assert resumed.outcomes[0].losses == whole.outcomes[0].losses
    ours, theirs = (saved(one.directory / "recipe")["tensors"] for one in (whole, resumed))
    assert_same(ours, theirs)
    assert lpq.checkpoint.info(resumed.directory / "recipe").policy == policy


@pytest.mark.usefixtures("planted")
def test_a_run_goes_on_from_the_checkpoint_before_a_promotion_where_the_next_is_damaged(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of tensors keeps its size; the checkpoint that is loaded gives the rules and the course."""
    options = {"recipe": "nvfp4", "baseline": False, "promote": 2, "checkpoint_every": 1}
    cut, courses = tiny("cut", **options), list[Any]()

    def stopping(self: Trainer) -> Any:
        courses.append(self.trigger and self.trigger.course.state_dict())
        if self.step == 3:
            raise KeyboardInterrupt
        return advance(self)

    advance = Trainer.advance
    monkeypatch.setattr(Trainer, "advance", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(cut, console)
    newest = Path(str(cut.out)) / "recipe" / "step-00000003"
    assert len((lpq.checkpoint.info(newest).policy or lpq.policy("mxfp8")).rules) > 1
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"damage" + largest.read_bytes()[6:])
    before = [*courses]
    with pytest.raises(KeyboardInterrupt):
        run(tiny("cut", **options, resume=True), console)
    assert "resumed after step 2" in shown(console)
    assert courses[len(before)] == before[2]


def test_a_jump_that_bf16_has_as_well_promotes_nothing_and_is_recorded(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Trainer.loss
    monkeypatch.setattr(Trainer, "loss", lambda self, *given: loss(self, *given) * (40 if self.step == 3 else 1))
    monkeypatch.setattr(lpq.observe.trigger, "Course", lambda: Course(window=3, least=2, loss=30))
    replayed = run(tiny(recipe="nvfp4", baseline=False, promote=2), console)
    found = {record["step"]: record["replay"] for record in records(replayed.directory) if "replay" in record}
    assert [*found] == [4]  # records count the steps that are done
    assert "in bf16 the step is off its course as well: no layer's format is the cause" in found[4]
    assert "They are in bf16" not in found[4]
    assert "no layer's format is the cause" in shown(console)
    assert len(lpq.checkpoint.info(replayed.directory / "recipe").policy.rules) == 1


@pytest.mark.parametrize("promote", [0, 2])
def test_a_step_that_is_no_number_is_done_again_where_layers_are_promoted(
    promote: int, tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that the run ends, and the error names them."""
    gradients = Trainer._gradients

    def broken(self: Trainer, *given: Any) -> tuple[float, float]:
        loss, norm = gradients(self, *given)
        promoted = self.trigger is not None and self.trigger.promoted
        return (math.nan if self.step == 2 and not promoted else loss), norm

    monkeypatch.setattr(Trainer, "_gradients", broken)
    config = tiny(recipe="nvfp4", baseline=False, replay=True, promote=promote)
    if promote:
        losses = run(config, console).outcomes[0].losses
        assert all(map(math.isfinite, losses))
        assert "step 3: the loss is nan" in shown(console)
        return
    with pytest.raises(Diverged, match=r"(?s)training diverged.*step 3: the loss is nan.*%  blocks.0"):
        run(config, console)


def test_a_step_behind_one_that_was_done_again_is_replayed_as_well(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was done again was on the course. Each step is a number if one more layer is promoted."""
    gradients = Trainer._gradients

    def broken(self: Trainer, *given: Any) -> tuple[float, float]:
        loss, norm = gradients(self, *given)
        promoted = 0 if self.trigger is None else len(self.trigger.promoted)
        return (math.nan if self.step in (2, 3) and promoted < self.step - 1 else loss), norm

    monkeypatch.setattr(Trainer, "_gradients", broken)
    done = run(tiny(recipe="nvfp4", baseline=False, promote=3, layers=2), console)
    assert all(map(math.isfinite, done.outcomes[0].losses))
    assert [record["step"] for record in records(done.directory) if "replay" in record] == [3, 4]
