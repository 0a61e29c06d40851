"""A norm that encodes its output for the layers that multiply it, as a fused one does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.nn.shared_states import EncodedBy, shared_state
from lpq.operations import encode_operands
from lpq.operations.inputs import as_matrix


class Encode(torch.autograd.Function):
    """A producer: it encodes its output by what the layers that get it remember."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        state, quantizer = shared_state(layers), layers[0].recipe.x
        assert state is not None
        trains = any(layer.weight.requires_grad for layer in layers)
        row, col, measured = encode_operands(quantizer, as_matrix(x), col=trains, state=state)
        t = QuantizedTensor(row, col, quantizer, x.shape, x.dtype)
        t.encoded_by = EncodedBy(layers, state, measured, trains)
        return t

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class Block(nn.Module):
    """A norm, and layers that multiply its output."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(nn.Linear(32, 48, bias=bias) for bias in (True, False, False))
        self.fused = fused
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return sum(layer(x) * (i + 1) for i, layer in enumerate(self.layers) if i != self.skipped)  # type: ignore[return-value]

    def norm(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return Encode.apply(x, [*self.layers]) if self.fused else x  # type: ignore[no-any-return]


def block(recipe: str = "fp8-delayed", fused: bool = True) -> Any:
    return lpq.convert(Block(fused), recipe, include="all")
