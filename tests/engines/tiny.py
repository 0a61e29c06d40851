"""Small random models that are exported, how layouts hold them, and what lpq decodes their weights to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.hugging_face import small
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.files.safetensors import Reader

MIXTURE = {"rules": [{"match": "*mlp*", "recipe": "nvfp4"}, {"match": "*self_attn*", "recipe": "mxfp8"}]}


class Case(NamedTuple):
    """A recipe in a layout."""

    layout: str
    recipe: Any
    static: bool = False
    """Whether the amax of inputs is known."""

    def __str__(self) -> str:
        recipe = self.recipe if isinstance(self.recipe, str) else "mixture"
        return f"{self.layout}-{recipe}{'-static' if self.static else ''}"

    def options(self, model: nn.Module) -> dict[str, Any]:
        """The arguments of ``lpq.export``."""
        return {"layout": self.layout, "input_amax": dict.fromkeys(layers(model), 3.75) if self.static else None}


WEIGHT_ONLY = "x=bf16, w=fp8(scaling=row), dy=bf16"
FLOAT_SCALES = "x=fp8(scaling=block), w=fp8(scaling=block, block=128x128, pow2=false), dy=bf16"
READ_BY_TRANSFORMERS = [
    Case("fp8-block", "fp8-block"), Case("fp8-block", FLOAT_SCALES), Case("compressed-tensors", "fp8-current"),
    Case("compressed-tensors", "fp8-current", True), Case("compressed-tensors", "fp8-row"),
    Case("compressed-tensors", "fp8-block"), Case("compressed-tensors", "mxfp8"), Case("compressed-tensors", "nvfp4"),
    Case("compressed-tensors", "nvfp4", True), Case("compressed-tensors", "mxfp4"),
    Case("compressed-tensors", WEIGHT_ONLY),
]  # fmt: skip
MIXED = Case("compressed-tensors", MIXTURE, True)
MODELOPT = [
    Case("modelopt", "fp8-current", True), Case("modelopt", "fp8-row"), Case("modelopt", "fp8-block"),
    Case("modelopt", "mxfp8"), Case("modelopt", "nvfp4"), Case("modelopt", "nvfp4", True),
    Case("modelopt", MIXTURE, True),
]  # fmt: skip
ALL = [*READ_BY_TRANSFORMERS, MIXED, *MODELOPT]


class Attention(nn.Module):
    """Some of the layers of a Llama's attention, by their names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x))


class Gated(nn.Module):
    """The same of its feed-forward layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    """Both, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(width), Attention(width), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attn(self.norm(x)))


class Net(nn.Module):
    """A small language model; ``tied``: the head has the weight of the embedding."""

    def __init__(self, width: int = 128, blocks: int = 1, tied: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.lm_head = nn.Linear(width, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.lm_head(x)
        return y


def llama(dtype: torch.dtype = torch.bfloat16, hidden: int = 128, **options: Any) -> Any:
    """The same weights each time."""
    return small("Llama", dtype, hidden=hidden, inner=256, **options)


def layers(model: nn.Module) -> dict[str, Any]:
    """The layers with a recipe, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, lpq.nn.Layer) and m.recipe is not None}


def operand(layer: Any) -> Any:
    """The row operand of a layer's weight, as forward multiplies it."""
    weight = layer.weight.detach()
    stored = weight if isinstance(weight, QuantizedTensor) else layer.recipe.w.quantize(weight, col=False)
    return stored.row


def decoded(layer: Any, dtype: torch.dtype) -> Tensor:
    """What lpq decodes a layer's weight to."""
    weight = layer.weight.detach()
    stored = weight if isinstance(weight, QuantizedTensor) else layer.recipe.w.quantize(weight, col=False)
    return stored.dequantize(dtype)


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of an exported model."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        reader = Reader(file)
        found |= {name: reader.read(name) for name in reader.tensors}
    return found


def config(path: Path) -> dict[str, Any]:
    """What an exported model says of its quantization."""
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found
