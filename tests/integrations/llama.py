"""A small Llama, batches for it, and Hugging Face's Trainer on a CPU, as the tests of this folder use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hugging_face import small
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
STEPS = 6
TWO_STAGES = {
    "rules": [{"match": "*_proj", "recipe": "fp8-delayed", "until": 0.5}, {"match": "*_proj", "recipe": "mxfp8"}],
}  # fmt: skip
"""The second stage begins at step 3 of 6."""


class MasterAdamW(MasterWeights):
    """As a class of optimizers, from which Trainer makes one with its own groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(torch.optim.AdamW(params, **options))


class RoundedAdamW(MasterWeights):
    """It keeps no masters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(torch.optim.AdamW(params, **options), keep=False)


class ReadsWeights(nn.Module):
    """Multiplies by the weight of the layer that it holds, as the attention of WavLM and timm's BEiT does."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.inner.weight)


def llama(seed: int = 0) -> Any:
    """The same weights each time."""
    return small("Llama", seed=seed)


def converted(policy: Any = "mxfp8", *, steps: Any = "later", **options: Any) -> Any:
    return lpq.convert(llama(), policy, steps=steps, **options)


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer(
    model: nn.Module, out: Path, *callbacks: Any, masters: bool = False, cls: Any = None, **options: Any
) -> Any:
    """A Trainer that saves every second step, and logs the loss of every step."""
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "learning_rate": 1e-2, "disable_tqdm": True, **options,
    }  # fmt: skip
    stored = any(isinstance(p, QuantizedTensor) for p in model.parameters())
    steps = (MasterAdamW if masters else RoundedAdamW, {"lr": settings["learning_rate"]})
    given = {"optimizer_cls_and_kwargs": steps} if stored else {}
    arguments = transformers.TrainingArguments(str(out), **settings)
    data = examples()
    return (cls or transformers.Trainer)(
        model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks), **given
    )


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an ordinary model."""
    state = model.state_dict()
    return {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in state.items()}


def codes(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of all weights that are stored quantized."""
    stored = {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    return {
        f"{name}.{direction}.{key}": buffer.reshape(-1).view(torch.uint8)
        for name, weight in stored.items()
        for direction, operand in weight.operands
        for key, buffer in operand.buffers().items()
    }
