"""Blocks whose feed-forward half is a mixture of experts, as Mixtral and Qwen3-MoE have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.llama import Block, Llama
from benchmarks.shapes import Mixture
from lpq.nn import GroupedLinear


class Experts(nn.Module):
    """The experts and nothing else: rows that lie expert by expert, and where each expert's end."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.gate = GroupedLinear(shape.experts, shape.hidden, shape.ffn, bias=False, recipe=None)
        self.up = GroupedLinear(shape.experts, shape.hidden, shape.ffn, bias=False, recipe=None)
        self.down = GroupedLinear(shape.experts, shape.ffn, shape.hidden, bias=False, recipe=None)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(rows, ends)) * self.up(rows, ends), ends)
        return y


class Routed(nn.Module):
    """Each token goes to the experts that its router prefers. Some are preferred by all tokens, so that ranks with
    experts get unequal numbers of rows, as early in training."""

    preference: Tensor

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.count, self.chosen = shape.experts, shape.chosen
        self.register_buffer("preference", -shape.skew * torch.arange(1.0, shape.experts + 1).log())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens).float() + self.preference
        shares, experts = logits.softmax(-1).topk(self.chosen)
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=self.count).cumsum(0, dtype=torch.int32)
        sent = order // self.chosen
        y = self.experts(tokens[sent], ends) * shares.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, sent, y).view_as(x)


def mixture(shape: Mixture) -> Llama:
    """The blocks of a Llama with experts in place of each feed-forward half."""
    model = Llama(shape)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.ffn = Routed(shape)  # type: ignore[assignment]
    return model
