"""The model of a checkpoint that ``lpq train`` wrote, for commands that go on with it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import lpq
from lpq.checkpoint.info import Info
from lpq.registry.errors import OptionError
from lpq.train.config import TrainConfig
from lpq.train.model import GPT, GPTShape


def trained(path: Path, info: Info, otherwise: str) -> tuple[TrainConfig, GPT]:
    """Return the settings of the run that wrote a checkpoint, and a model of their size; nothing is loaded.

    ``otherwise``: what to do with a checkpoint that ``lpq train`` did not write.
    """
    settings = info.extra.get("config") if isinstance(info.extra, dict) else None
    if not isinstance(settings, str):
        raise OptionError(f"{path} was not written by lpq train: {otherwise}")
    config = TrainConfig(**tomllib.loads(settings))
    return config, GPT(GPTShape(config.layers, config.heads, config.width))


def loaded(model: Any, path: Path, info: Info) -> Any:
    """Return the model with the recipes and the tensors of a checkpoint."""
    if info.policy is not None:
        stored = info.description.quantized
        lpq.convert(model, info.policy, steps=info.steps, weights="quantized" if stored else None)
    lpq.checkpoint.load(model, path)
    return model
