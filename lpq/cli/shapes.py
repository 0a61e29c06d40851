"""The shapes of models that people train, as modules on the meta device: they have parameters and do nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer with grouped-query attention and a gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int


SHAPES = {
    "llama-3-8b": ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256),
    "llama-3-70b": ModelShape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256),
    "tiny": ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768, vocabulary=1024),
}


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(hidden, shape.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.ffn, hidden, bias=False)


class Transformer(nn.Module):
    """A model with this shape, on the meta device."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
            self.blocks = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.hidden)
            self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
