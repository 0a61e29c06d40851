"""A small byte-level GPT in plain PyTorch; low precision is what ``lpq.convert`` brings into it.

Every matrix of a block is an ``nn.Linear``. The head is the embedding's matrix (tied weights) and no module
of its own, so that both stay in high precision, as low-precision training commonly keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
"""The vocabulary: every byte is a token."""


@dataclass(frozen=True)
class GPTShape:
    """The size of a model."""

    layers: int
    heads: int
    width: int


class Attention(nn.Module):
    """Causal self-attention over rotary positions."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` ``[…, length, dim]`` with its pairs (element i and i + dim / 2) turned by these angles."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Norm(nn.LayerNorm):
    """Layer norm without a bias, in the precision of its input; its weight may have been gathered in a lower one."""

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), None, self.eps)


class MLP(nn.Module):
    """The feed-forward half of a block, four times as wide inside."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Pre-norm attention, then pre-norm MLP, each added to the residual stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = Norm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = Norm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Maps bytes ``[batch, length]`` to logits ``[batch, length, 256]``. Torch's seed gives the weights."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Layers that write into the residual stream start smaller: its variance shall not grow with depth.
                into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=(p.shape[1] * (2 * shape.layers if into_stream else 1)) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        shape = self.shape
        places = torch.arange(tokens.shape[1], device=tokens.device)
        frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / (shape.width // shape.heads), device=tokens.device)
        angles = torch.outer(places, frequencies)  # by which each pair of a head's elements is rotated
        x = self.embedding(tokens).float()
        for block in self.blocks:
            x = block(x, angles)
        return F.linear(self.norm(x), self.embedding.weight)
