"""Forward and backward of one linear layer without bias, at the sizes of real models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.floor import FLOORS, Bare
from benchmarks.layers import encoded_bytes, held, layers_of
from benchmarks.timing import copy_speed
from lpq.bench.contenders import Contender
from lpq.bench.layers import LayerSize
from lpq.bench.timing import Effort, on_gpu


def measure(
    everyone: list[Contender], shapes: tuple[LayerSize, ...], effort: Effort, device: torch.device
) -> dict[str, Any]:
    """At each shape: milliseconds of each contender, the bytes it keeps for backward, and the floors."""
    copied = copy_speed(device)
    return {"copy_speed": copied, "shapes": [_at(shape, everyone, effort, device, copied) for shape in shapes]}


def _at(
    shape: LayerSize, everyone: list[Contender], effort: Effort, device: torch.device, copied: float
) -> dict[str, Any]:
    layers = layers_of(everyone, shape, device)
    kept = {c.name: held(layers, c.name) for c in everyone if c.mode is None}  # what a graph keeps is its own
    bare = {name: Bare(floor, shape, device) for name, floor in FLOORS.items()}
    alone = {key: step for name, made in bare.items() for key, step in made.steps(name).items()}
    taken = on_gpu({**layers.steps(), **alone}, effort)
    return {
        **asdict(shape),
        "floors": {
            name: floor.record(shape, taken[f"gemms of {name}"], taken[f"stream of {name}"], copied)
            for name, floor in FLOORS.items()
        },
        "results": [
            {
                **c.record(),
                **(taken[c.name].record("ms") if c.name in taken else {}),
                "held_bytes": kept.get(c.name),
                "encoded_bytes": encoded_bytes(c.recipe, shape) if c.library == "lpq" else None,
                "failure": layers.failures.get(c.name),
            }
            for c in everyone
        ],
    }
