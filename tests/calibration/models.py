"""Small models that are calibrated, and their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lpq
from lpq.nn import Layer


class Attention(nn.Module):
    """Three layers with one input, which engines fuse, and one more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) * self.k_proj(x).sigmoid() + self.v_proj(x))


class Gated(nn.Module):
    """An expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention, and experts of which ``used`` get the tokens."""

    def __init__(self, width: int, experts: int, used: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width)
        self.experts = nn.ModuleList(Gated(width) for _ in range(experts))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        for expert in [*self.experts][: self.used]:
            x = x + expert(x)
        return x


def model(
    width: int = 64, blocks: int = 1, experts: int = 3, used: int = 3, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """The same weights each time; those of q, k and v have amaxes that differ."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(width, experts, used) for _ in range(blocks))).to(dtype)
    with torch.no_grad():
        for block in net:
            block.attn.q_proj.weight[5, 7] = 0.75
            for expert in [*block.experts][-1:]:
                expert.w3.weight[60, 3] = -1.25
    return net


def data(
    count: int = 8, width: int = 64, samples: int = 4, dtype: torch.dtype = torch.float32, tokens: int = 3
) -> list[Tensor]:
    """Batches of some samples of some tokens; the largest element is in the middle one."""
    found = [torch.randn(samples, tokens, width, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    found[len(found) // 2][0, 1, 5] = 11.0
    return [batch.to(dtype) for batch in found]


def layers(net: nn.Module) -> dict[str, Layer]:
    return {name: module for name, module in net.named_modules() if isinstance(module, Layer)}


def statics(net: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, m in layers(net).items() for key, value in m.static_values().items()}


def converted(recipe: str, **options: int) -> nn.Module:
    return lpq.convert(model(**options), recipe)
