"""Policies that ``lpq.search`` finds, beside uniform recipes of their predicted time.

python -m benchmarks.searched               writes results/curves/searched.toml
python -m benchmarks.searched --batches 32  writes searched-32.toml, by the mean gradients of 32 batches in place of 4

Each prints the command that trains the policy. The model is the toy of
``lpq compare``, trained in bf16 for a while from a seed that the comparison does not have. Its layers are too small for
times to be predicted, so the times are those of layers 64 times as wide.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import lpq
from benchmarks.evidence import CURVES
from lpq.bench.gpus import GPUS, predicted
from lpq.bench.layers import LayerSize
from lpq.recipes import Recipe
from lpq.train import data
from lpq.train.compare_config import training
from lpq.train.machine import fixed_sums
from lpq.train.team import Team
from lpq.train.trainer import Trainer

UNIFORM = (
    "mxfp8-fwd-nvfp4-bwd",
    "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4",
    "fprop=nvfp4, dgrad=nvfp4, wgrad=mxfp8",
)
"""The uniform recipes of about the same time: one product in MXFP8, two in NVFP4."""
CARD, TOKENS, WIDER = GPUS["b200"], 16384, 64
SEED, STEPS, BATCHES = 1000, 60, 4
COMPARED = {4: "--seeds 8 --tokens 40k --at-once 1", 32: "--seeds 12 --tokens 40k --at-once 1"}
"""The options of the comparisons by batches, which were fixed before the policies were trained."""


def main(batches: int) -> None:
    """Search, and write the policy."""
    policy = CURVES / ("searched.toml" if batches == BATCHES else f"searched-{batches}.toml")
    config = replace(training("toy", "40k", {"device": "cpu", "threads": 1}), seed=SEED, steps=STEPS)
    text = data.load(config.data, config.seq, config.text)
    with fixed_sums(torch.device("cpu"), config.threads):
        trainer = Trainer(config, text, None, Team(torch.device("cpu")), probes=False)
        while trainer.step < STEPS:
            trainer.advance()
        shapes = {name: m for name, m in trainer.model.named_modules() if isinstance(m, torch.nn.Linear)}

        def seconds(name: str, recipe: Recipe | None) -> float:
            layer = shapes[name]
            size = LayerSize(TOKENS, WIDER * layer.in_features, WIDER * layer.out_features)
            return predicted(CARD, size, recipe)

        def closure(number: int) -> torch.Tensor:
            loss = trainer.loss(*text.batch(config.seed, STEPS + number, config.batch, config.seq))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        least = min(sum(seconds(name, lpq.recipe(text)) for name in shapes) for text in UNIFORM)
        plain = sum(seconds(name, None) for name in shapes)
        found = lpq.search(
            trainer.model,
            [lambda number=number: closure(number) for number in range(batches)],  # type: ignore[misc]
            time=least / plain,
            recipes=("mxfp8", "nvfp4", *UNIFORM),
            seconds=seconds,
        )
    found.write(policy)
    print(found)
    named = " ".join(f'"{one}"' if " " in one else one for one in UNIFORM)
    place = Path("benchmarks/results/curves")
    print(f"python -m lpq compare {named} {place / policy.name} {COMPARED[batches]} --out {place / 'searched'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, choices=COMPARED, default=BATCHES)
    main(parser.parse_args().batches)
