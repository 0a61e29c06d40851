"""One training of ``lpq compare`` with a change that no policy makes, for scripts that compare such changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median

import torch

from lpq.recipes import Policy
from lpq.train import data, trainings
from lpq.train.compare import DIGITS
from lpq.train.compare_config import training
from lpq.train.config import TrainConfig
from lpq.train.machine import described, fixed_sums
from lpq.train.team import Team
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

Change = Callable[[Trainer], None]


def settings(size: str, tokens: str | None, device: torch.device, seed: int) -> TrainConfig:
    """The settings of a size of ``lpq compare``, for one seed."""
    return replace(training(size, tokens, {"device": str(device), "threads": 1}), seed=seed)


def trained(
    title: str, config: TrainConfig, policy: Policy | None, command: str, before: Change, after: Change
) -> tuple[Trainer, Training]:
    """Train once; ``before`` is called with the trainer before the first step, and ``after`` behind each."""
    text = data.load(config.data, config.seq, config.text)
    device = torch.device(config.device)
    with fixed_sums(device, config.threads), torch.compiler.set_stance("default" if config.compile else "force_eager"):
        trainer = Trainer(config, text, policy, Team(device=device), probes=False)
        before(trainer)
        held_out, seconds = [], []
        while trainer.step < config.steps:
            seconds.append(trainer.advance()["seconds"])
            after(trainer)
            if trainer.step % config.validate_every == 0 or trainer.step == config.steps:
                held_out.append((trainer.step, round(trainer.held_out_loss(), DIGITS)))
    return trainer, Training(
        title=title,
        seed=config.seed,
        policy=trainer.policy_text,
        settings=trainings.shared(config),
        source=text.source,
        text=text.digest,
        losses=[round(loss, DIGITS) for loss in trainer.losses],
        held_out=held_out,
        diverged=None,
        step_seconds=median(seconds),
        machine=described(device),
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def nothing(trainer: Trainer) -> None:
    """Change nothing."""
