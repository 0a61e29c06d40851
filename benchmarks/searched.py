"""Policies that ``lpq.search`` finds, beside uniform recipes of their predicted time.

python -m benchmarks.searched                 writes results/curves/searched.toml
python -m benchmarks.searched searched-32     writes searched-32.toml, by the mean gradients of 32 batches in place of 4
python -m benchmarks.searched searched-5m     writes searched-5m.toml, for a time between two uniform recipes; on a GPU
python -m benchmarks.searched searched-5m-faster    the same for a quarter of the way in place of half of it
python -m benchmarks.searched searched-between      writes searched-between.toml, beside all recipes of its time

Each prints the predicted times of all recipes, and the command that trains the policy. The model is one of
``lpq compare``, trained in bf16 for a while from a seed that the comparison does not have. Times are predicted as
``widened`` has them.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import lpq
from benchmarks import widened
from benchmarks.evidence import CURVES
from lpq.recipes import Recipe
from lpq.train import data
from lpq.train.compare_config import training
from lpq.train.machine import fixed_sums, pick_device
from lpq.train.team import Team
from lpq.train.trainer import Trainer

SEED = 1000


@dataclass(frozen=True)
class Study:
    """A policy, and the comparison that it is in. Both were fixed before the first training."""

    uniform: tuple[str, ...]
    """The recipes that the policy is compared with."""
    compared: str
    """The options of the comparison."""
    folder: str = "searched"
    """The folder of the comparison."""
    size: str = "toy"
    steps: int = 60
    batches: int = 4
    recipes: tuple[str, ...] = ("mxfp8", "nvfp4")
    """The recipes that products are taken from, beside those in ``uniform``."""
    others: tuple[str, ...] = ()
    """Recipes of the comparison that are not searched with: they remember earlier steps, or take longer."""
    between: float | None = None
    """The time: 0 is the time of the fastest recipe in ``uniform``, 1 the time of the slowest one; None is 0."""


ONE_OF_THREE = (
    "mxfp8-fwd-nvfp4-bwd",
    "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4",
    "fprop=nvfp4, dgrad=nvfp4, wgrad=mxfp8",
)
"""The uniform recipes of about the same time: one product in MXFP8, two in NVFP4."""
IN_TIME = tuple(
    recipe
    for kind in widened.FOUR_BITS
    for recipe in (kind, f"fprop={kind}, dgrad={kind}, wgrad=mxfp8", f"fprop={kind}, dgrad=mxfp8, wgrad={kind}")
)
"""The uniform recipes of bf16, MXFP8 and either kind of NVFP4 that take no longer than one with dgrad in MXFP8, each
with all its products in NVFP4 of one kind."""
FASTER = partial(
    Study,
    ("nvfp4", "nvfp4-four-over-six", "nvfp4-eden", "mxfp8-fwd-nvfp4-bwd"),
    "--size 5m --seeds 30 --at-once 16",
    "searched-5m",
    size="5m",
    steps=200,
    batches=8,
    recipes=("mxfp8",),
    others=("nvfp4-eden-delayed",),
)
STUDIES = {
    "searched": Study(ONE_OF_THREE, "--seeds 8 --tokens 40k --at-once 1"),
    "searched-32": Study(ONE_OF_THREE, "--seeds 12 --tokens 40k --at-once 1", batches=32),
    "searched-5m": FASTER(between=0.5),
    "searched-5m-faster": FASTER(between=0.25),
    "searched-between": Study(
        IN_TIME,
        "--seeds 16 --tokens 40k --at-once 1",
        "searched-between",
        batches=32,
        recipes=("mxfp8",),
        others=("mxfp8-fwd-nvfp4-bwd",),
        between=1,
    ),
}


def main(name: str, size: str | None, device: str, out: Path) -> None:
    """Search, and write the policy."""
    study = STUDIES[name]
    place = pick_device(device)
    config = replace(training(size or study.size, None, {"device": str(place), "threads": 1}), seed=SEED)
    config = replace(config, steps=study.steps)
    text = data.load(config.data, config.seq, config.text)
    layers = widened.sizes(config.layers, config.heads, config.width)
    plain = widened.whole(layers, None)
    took = {recipe: widened.whole(layers, policy) for recipe, policy in widened.uniform().items()}
    for recipe, seconds in sorted(took.items(), key=lambda one: one[1]):
        print(f"{plain / seconds:.2f} times as fast as bf16, predicted: {recipe}")
    ends = sorted(widened.whole(layers, lpq.policy(recipe)) for recipe in study.uniform)
    time = ends[0] + (study.between or 0) * (ends[-1] - ends[0])

    def by_name(layer: str, recipe: Recipe | None) -> float:
        return widened.seconds(layers[layer], recipe)

    with fixed_sums(place, config.threads):
        trainer = Trainer(config, text, None, Team(device=place), probes=False)
        while trainer.step < study.steps:
            trainer.advance()

        def closure(number: int) -> torch.Tensor:
            loss = trainer.loss(*text.batch(config.seed, study.steps + number, config.batch, config.seq))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        found = lpq.search(
            trainer.model,
            [partial(closure, number) for number in range(study.batches)],
            time=time / plain,
            recipes=(*study.recipes, *study.uniform),
            seconds=by_name,
        )
    out.mkdir(parents=True, exist_ok=True)
    policy = out / f"{name}.toml"
    found.write(policy)
    print(found)
    named = shlex.join((*study.uniform, *study.others))
    print(f"python -m lpq compare {named} {policy} {study.compared} --out {out / study.folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=STUDIES, default="searched")
    parser.add_argument("--size", help="another size of lpq compare, to try it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=CURVES)
    given = parser.parse_args()
    main(given.name, given.size, given.device, given.out)
