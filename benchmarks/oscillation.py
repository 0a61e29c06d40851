"""Losses with oscillating masters set back to the values of their codes: ``python -m benchmarks.oscillation``.

The method is OsciReset of TetraJet-v2 (arXiv:2510.27527): where the decoded weight moved at least ``RATIO`` times as
far as its master in some steps, it went back and forth between two codes, and the master takes the value of its code.
The model is the toy of ``lpq compare``, whose weights ``nvfp4`` stores, with masters. Each training leaves a file
in ``results/curves/oscillation``, and one whose file is there is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

import lpq
from benchmarks.evidence import CURVES
from benchmarks.trained import nothing, settings, trained
from lpq.optim import MasterWeights
from lpq.tensor import QuantizedTensor
from lpq.train import trainings
from lpq.train.machine import pick_device
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

SEEDS = 16
"""Eight were fixed before anything was trained, and then eight more, to see whether they say the same."""
TOKENS = "409600"
"""The bytes of 800 steps."""
BEGIN, EVERY, STEPS, RATIO = 0.6, 100, 50, 8.0
"""The part of a run before the first watch, the steps from one to the next, its length, and the ratio of distances."""
BASELINE, PLAIN, RESET = "bf16", "nvfp4", "nvfp4 with resets"
COMMAND = "python -m benchmarks.oscillation"


class Resets:
    """Watches how far weights and masters move, and sets masters back; to be called after each step."""

    def __init__(self, steps: int) -> None:
        self.begin = round(BEGIN * steps)
        self.last: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """The decoded weight and the master after the step before."""
        self.moved: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """How far both moved, added up since the watch began."""
        self.shares: list[float] = []
        """The part of the weights that each reset found to oscillate."""

    @torch.no_grad()
    def __call__(self, trainer: Trainer) -> None:
        watched, optimizer = trainer.step - self.begin, cast("MasterWeights", trainer.optimizer)
        phase = watched % EVERY
        if watched < 0 or phase > STEPS:
            return
        now = {weight: (_decoded(weight), master.clone()) for weight, master in optimizer.masters.items()}
        if phase == 0:
            self.moved = {weight: (torch.zeros_like(a), torch.zeros_like(b)) for weight, (a, b) in now.items()}
        else:
            for weight, pair in now.items():
                for total, value, before in zip(self.moved[weight], pair, self.last[weight], strict=True):
                    total += (value - before).abs()
        self.last = now
        if phase == STEPS:
            self._reset(optimizer, now)

    def _reset(self, optimizer: MasterWeights, now: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
        there = {weight: (far >= RATIO * near) & (far > 0) for weight, (far, near) in self.moved.items()}
        self.shares.append(sum(int(t.sum()) for t in there.values()) / sum(t.numel() for t in there.values()))
        for weight, master in optimizer.masters.items():
            master.copy_(torch.where(there[weight], now[weight][0], master))
        optimizer.encode()


def _decoded(weight: Tensor) -> Tensor:
    return cast("QuantizedTensor", weight).dequantize(torch.float32)


def train(title: str, seed: int, tokens: str = TOKENS) -> Training:
    """Train once. A training with resets has the part of the weights that each found."""
    config = settings("toy", tokens, pick_device("cpu"), seed)
    if title == BASELINE:
        return trained(title, config, None, COMMAND, nothing, nothing)[1]
    resets = Resets(config.steps) if title == RESET else None
    stored = replace(config, weights="quantized")
    _, found = trained(title, stored, lpq.policy("nvfp4"), COMMAND, nothing, resets or nothing)
    if resets is None:
        return found
    return replace(found, settings={**found.settings, "reset": [round(share, 4) for share in resets.shares]})


def main() -> None:
    """Do the trainings that are not there, seed by seed."""
    folder = CURVES / "oscillation"
    folder.mkdir(exist_ok=True)
    for seed in range(SEEDS):
        for title in (BASELINE, PLAIN, RESET):
            if not trainings.file_of(folder, title, seed).exists():
                found = train(title, seed)
                found.write(folder)
                print(f"{title}, seed {seed}: {found.result:.4f}, {found.settings.get('reset', '')}", flush=True)


if __name__ == "__main__":
    main()
