"""The end of a run: tables and a conclusion on the screen, ``summary.json`` and ``loss.png`` in its directory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lpq.files.outputs import writable
from lpq.registry import tables
from lpq.registry.showing import printable
from lpq.train import runs
from lpq.train.conclusion import conclusion
from lpq.train.config import TrainConfig
from lpq.train.errors import GOES_ON
from lpq.train.measure import ServedProduct, StepBytes
from lpq.train.plot import Curve, draw
from lpq.train.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """The results of training one model."""

    title: str
    losses: tuple[float, ...]
    """The loss of every step, in nats per byte."""
    held_out_loss: float
    measured: StepBytes
    """The bytes that a step holds and sends."""
    seconds: float
    """The time of a step, its median."""
    served: tuple[ServedProduct, ...]
    sharded: bool = False

    @classmethod
    def of(cls, title: str, trainer: Trainer, seconds: float, served: Sequence[ServedProduct]) -> Outcome:
        """The outcome of a trainer that has done its last step."""
        loss = trainer.held_out_loss()
        assert trainer.measured is not None
        return cls(title, tuple(trainer.losses), loss, trainer.measured, seconds, tuple(served), trainer.team.many)

    @property
    def perplexity(self) -> float:
        """The perplexity per byte on the held-out text."""
        return math.exp(self.held_out_loss)

    def to_dict(self) -> dict[str, Any]:
        """The results for JSON, with the last training loss only, since ``metrics.jsonl`` has all."""
        beside = {"bytes_held": self.measured.held, "perplexity": self.perplexity}
        return {**asdict(self), "losses": self.losses[-1:], **beside}


@dataclass(frozen=True)
class Summary:
    """The results of a run: the outcome of the recipe, of the baseline, and of the baseline with another seed.

    A training that was left out has no outcome."""

    config: TrainConfig
    device: str
    directory: Path
    outcomes: tuple[Outcome, ...]

    @property
    def gap(self) -> float | None:
        """How much more loss the recipe has than the baseline, as a fraction; None without a baseline."""
        if len(self.outcomes) < 2:
            return None
        recipe, baseline, *_ = self.outcomes
        return recipe.held_out_loss / baseline.held_out_loss - 1

    @property
    def seed_distance(self) -> float | None:
        """How much more loss the baseline has with another seed, as a fraction; None without such a training."""
        if len(self.outcomes) < 3:
            return None
        _, baseline, other = self.outcomes
        return other.held_out_loss / baseline.held_out_loss - 1

    def to_dict(self) -> dict[str, Any]:
        """The results for JSON."""
        return {
            "config": asdict(self.config),
            "device": self.device,
            "torch": torch.__version__,
            "gap": self.gap,
            "seed_distance": self.seed_distance,
            "outcomes": [o.to_dict() for o in self.outcomes],
        }


def close(summary: Summary, console: Console, *, on_cpu: bool) -> Summary:
    """Print the results of a run, and write them to its files."""
    tables.table("lpq train", ["", *(o.title for o in summary.outcomes)], comparison(summary), console)
    served = [
        (s.gemm, s.operands, "; ".join([s.kernel, *s.why_not]), str(s.layers)) for s in summary.outcomes[0].served
    ]
    tables.table("what ran the products of the last step", ("product", "operands", "kernel", "layers"), served, console)
    with writable(summary.directory / runs.SUMMARY, GOES_ON) as file:
        file.write_text(json.dumps(summary.to_dict(), indent=1) + "\n", encoding="utf-8")
    recipe, *others = summary.outcomes
    curves = [Curve(recipe.title, 0, recipe.losses)]
    curves += [Curve(others[0].title, seed, o.losses, baseline=True) for seed, o in enumerate(others)]
    with writable(summary.directory / runs.PLOT, GOES_ON) as file:
        plotted = draw(curves, file)
    where = f"written to {summary.directory}/: {runs.SUMMARY}, the metrics of each step, checkpoints, {plotted}"
    console.print(where, markup=False)  # to rich a name in brackets is a style
    for paragraph in conclusion([o.title for o in summary.outcomes], summary.gap, summary.seed_distance, on_cpu=on_cpu):
        console.print(f"\n{printable(paragraph)}", markup=False, highlight=False)
    return summary


def comparison(summary: Summary) -> list[tuple[str, ...]]:
    """The numbers of the runs side by side."""
    outcomes = summary.outcomes
    rows = [
        ("held-out loss (nats per byte)", *(f"{o.held_out_loss:.4f}" for o in outcomes)),
        ("perplexity (per byte)", *(f"{o.perplexity:.5g}" for o in outcomes)),
    ]
    if summary.gap is not None:
        other = () if summary.seed_distance is None else (f"{summary.seed_distance:+.2%}",)
        rows.append((f"gap to {outcomes[1].title}, of the loss", f"{summary.gap:+.2%}", "–", *other))
    rows.append(("training loss of the last step", *(f"{o.losses[-1]:.4f}" for o in outcomes)))
    rows.append(("held for backward, per step", *(size(o.measured.held) for o in outcomes)))
    if any(o.sharded for o in outcomes) or summary.config.weights == "quantized":
        rows += memory([o.measured for o in outcomes])
    rows.append(("time per step", *(f"{o.seconds * 1e3:.0f} ms" for o in outcomes)))
    return rows


def memory(measured: Sequence[StepBytes]) -> list[tuple[str, ...]]:
    """The bytes that a rank holds and those that all ranks gather."""
    each = " of each rank" if any(m.ranks > 1 for m in measured) else ""
    counts = {
        "gathered per step, forward": [m.forward for m in measured],
        "gathered per step, backward": [m.backward for m in measured],
        f"weights{each}": [m.weights for m in measured],
        f"gradients{each}": [m.gradients for m in measured],
        f"optimizer state{each}": [m.optimizer for m in measured],
        f"most memory in a step{each}": [m.peak or 0 for m in measured],
    }
    return [(title, *map(size, own)) for title, own in counts.items() if any(own)]


def size(count: int) -> str:
    """A number of bytes for people to read."""
    return f"{count / 2**20:.2f} MiB"
