"""A small module of Lightning with the same weights each time, and its Trainer on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq.integrations.lightning import LpqCallback, LpqPrecision

lightning: Any = pytest.importorskip("lightning", reason="needs lightning, which `make install` brings")
STEPS = 6
TWO_STAGES = {"rules": [{"match": "*", "recipe": "fp8-delayed", "until": 0.5}, {"match": "*", "recipe": "mxfp8"}]}
REVERSED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 0.5}, {"match": "*", "recipe": "fp8-delayed"}]}
"""The second stage begins at step 3 of 6."""


class Boring(lightning.LightningModule):  # type: ignore[misc]
    """It notes its losses, and the recipe of its first layer in each step."""

    def __init__(self, masters: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.masters = masters
        self.losses: list[float] = []
        self.recipes: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        y = self.net(batch)
        self.dtypes |= {batch.dtype, y.dtype}
        loss = (y - batch).square().mean()
        self.losses.append(loss.item())
        self.recipes.append(getattr(self.net[0], "recipe", None))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return lpq.optim.MasterWeights(optimizer) if self.masters else optimizer


def batches() -> list[Tensor]:
    """An epoch: of so few that each checkpoint is at the end of one, where Lightning resumes the order."""
    return [*torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))]


def loader(given: list[Tensor] | None = None) -> Any:
    return torch.utils.data.DataLoader(batches() if given is None else given, batch_size=None)


def trainer(out: Path, plugin: Any = None, *callbacks: Any, **options: Any) -> Any:
    """A Trainer that saves every second step."""
    keep = lightning.pytorch.callbacks.ModelCheckpoint(out, "{step}", every_n_train_steps=2, save_top_k=-1)
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_steps": STEPS, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": out, **options,
    }  # fmt: skip
    return lightning.Trainer(plugins=[] if plugin is None else [plugin], callbacks=[keep, *callbacks], **settings)


def fit(out: Path, model: Any, policy: Any, *, resume: Any = None, callback: Any = None, **options: Any) -> Any:
    """Train a model with the plugin and the callback, and return the Trainer."""
    given = {key: options.pop(key) for key in ("precision", "device", "weights", "ranks", "steps") if key in options}
    made = trainer(out, LpqPrecision(policy, **given), callback or LpqCallback(report=False), **options)
    made.fit(model, loader(), ckpt_path=resume)
    return made
