"""Under FSDP2 too, layers that are given the same tensor encode it once, and what is kept for backward is what their
recipe says."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.nn.linear import Layer
from lpq.nn.siblings import SharedInputs
from lpq.optim import MasterWeights

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from counting import encodings

ROWS, WIDTH = 16, 64
OF_X = (ROWS, WIDTH)


class Block(nn.Module):
    """As attention and a gated pair, with no more than they share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y: Tensor = x + self.out(self.q(normed) * self.k(normed))
        return y


def _trained(weights: Any, apart: bool, recipe: str = "mxfp8", kept: list[Tensor] | None = None) -> list[Tensor]:
    """Take two steps; ``kept`` gets the ordinary tensors that the second one's forward keeps for backward."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    lpq.convert(net, recipe, weights=weights)
    for module in net.modules() if apart else ():
        if isinstance(module, Layer):
            module.join(replace(module.model, inputs=SharedInputs()))
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = MasterWeights(optimizer, keep=False) if weights == "quantized" else optimizer
    found = []
    for step in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        y = net(x) if kept is None else _noting(net, x, kept)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.to_local() for p in net.parameters() if isinstance(p.grad, DTensor))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _noting(net: nn.Module, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.clear()

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y: Tensor = net(x)
    assert _memories(kept, torch.float32, (2 * WIDTH, WIDTH)) in ({0}, set())
    return y


def _memories(kept: list[Tensor], dtype: torch.dtype, *shapes: tuple[int, int]) -> set[int]:
    """The bytes that tensors of these shapes have now."""
    return {t.untyped_storage().nbytes() for t in kept if t.dtype == dtype and tuple(t.shape) in shapes}


@on_ranks(2)
def test_a_gathered_weight_that_is_kept_takes_no_memory_meanwhile(rank: int) -> None:
    """FSDP2 frees it after forward, and gathers it again for backward. Its encoded form would stay."""
    recipe, kept = "fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8", list[Tensor]()
    usual = _trained(None, apart=False, recipe=recipe, kept=kept)
    elements = _memories(kept, torch.float8_e4m3fn, (WIDTH, 2 * WIDTH))
    assert elements == {2 * WIDTH * WIDTH}
    found = _trained(None, apart=False, recipe=f"{recipe}, w.save=weight", kept=kept)
    assert equal(usual, found)
    weights = [t for t in kept if t.shape == (2 * WIDTH, WIDTH)]
    assert len(weights) == 4


@on_ranks(2)
def test_siblings_encode_once(rank: int) -> None:
    for weights in (None, "high_precision", "quantized"):
        with pytest.MonkeyPatch.context() as patch:
            seen = encodings(patch)
            found = []
            for apart in (False, True):
                found.append(_trained(weights, apart))
                counts = Counter(w.shape for w in seen if w.dtype == torch.float32 and w.col)
                dys = counts[OF_X] - (8 if apart else 4)  # that of out has the shape of an input
                assert dys == 4, (weights, apart, counts)
                seen.clear()
        assert equal(*found), weights
