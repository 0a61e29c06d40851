"""Blocks as Llama has them: grouped-query attention over rotary positions, and a gated feed-forward half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import Stack


class Attention(nn.Module):
    """Causal self-attention; several heads share a key and a value."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.width).transpose(1, 2)  # of this rank, if ranks share heads
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention, then the feed-forward half, each on a normed input and added to the residual stream."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention, self.ffn = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y: Tensor = x + self.ffn(self.norm2(x))
        return y


class Llama(nn.Module):
    """The blocks alone, ``[batch, sequence, hidden]`` to the same: embedding and head would hide what is compared."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def rotations(shape: Stack, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position and pair of a head's elements."""
    width = shape.hidden // shape.heads
    frequencies = 500_000.0 ** -torch.arange(0, 1, 2 / width, device=device)
    angles = torch.outer(torch.arange(shape.sequence, device=device), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[…, sequence, width]`` with its pairs (element i and i + width / 2) turned."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
