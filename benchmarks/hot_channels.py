"""Losses with a few channels in bf16, beside NVFP4 of the same seeds: ``python -m benchmarks.hot_channels``.

Needs ``pip install ./examples/lpq-hot-channels``. The model and the text are the toy's of ``lpq compare``. A training
begins by ``nvfp4``; after a quarter of the steps it finds the hot columns of each layer, on batches of other seeds, and
keeps these in bf16 for the rest, as TetraJet-v2 does. Each training leaves a file in ``results/curves/toy-others``,
beside the files of ``nvfp4`` and bf16 that ``lpq compare`` left there, and a training with a file is not repeated.
"""

from __future__ import annotations

from importlib import import_module

import torch

import lpq
from benchmarks.evidence import CURVES
from benchmarks.trained import nothing, settings, trained
from lpq.train import trainings
from lpq.train.machine import pick_device
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

SEEDS = 3
SHARES = (0.02, 0.1)
"""The parts of the columns, CHON's about and TetraJet-v2's."""
BATCHES = 8
"""How many batches tell which columns are hot."""


def train(share: float, seed: int, tokens: str | None = None) -> Training:
    """Train the toy once with this part of the columns of each layer in bf16."""
    rules = import_module("lpq_hot_channels.finding").rules
    config = settings("toy", tokens, pick_device("cpu"), seed)
    usual = lpq.policy("nvfp4")

    def find(trainer: Trainer) -> None:
        if trainer.step == config.validate_every:
            others = range(seed + 1000, seed + 1000 + BATCHES)
            batches = [trainer.text.batch(other, 0, config.batch, config.seq)[0] for other in others]
            with torch.random.fork_rng(devices=[]):
                found = rules(trainer.model, batches, share)
            kept = usual.to_dict()
            trainer.policy = lpq.policy(kept | {"rules": [*found, *kept["rules"]]})
            lpq.convert(trainer.model, trainer.policy, steps=config.steps)

    title = f"hot_channels {share:.0%}"
    return trained(title, config, usual, "python -m benchmarks.hot_channels", nothing, find)[1]


def main() -> None:
    """Do the trainings that are not there, seed by seed."""
    folder = CURVES / "toy-others"
    for seed in range(SEEDS):
        for share in SHARES:
            if not trainings.file_of(folder, f"hot_channels {share:.0%}", seed).exists():
                found = train(share, seed)
                found.write(folder)
                print(f"{found.title}, seed {seed}: {found.result:.4f}", flush=True)


if __name__ == "__main__":
    main()
