"""Under FSDP2 too, layers that are given the same tensor encode it once, blocks and norms as one function are their
layers one after the other, to the bit, and what is kept for backward is what the recipe says."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from support.comparing import equal
from support.small_models import LlamaMlp, Stream
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.nn import SwiGLU, norms
from lpq.nn.linear import Layer
from lpq.nn.residual_layers import ResidualLayer
from lpq.nn.siblings import SharedInputs
from lpq.optim import MasterWeights

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from counting import encodings

ROWS, WIDTH = 16, 64
OF_X, OF_W = (ROWS, WIDTH), (2 * WIDTH, WIDTH)


class Product(nn.Module):
    """As attention and a gated pair, with no more than they share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x))
        return y


class Block(nn.Module):
    """A norm and what is behind it, with a residual around both."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.norm(x))
        self.is_fused = "FusedMLP" in type(y.grad_fn).__name__
        return x + y


def product() -> nn.Module:
    return Block(Product())


def _sharded(make: Callable[[], nn.Module], recipe: str, weights: Any, unit: bool = False, **how: Any) -> Any:
    torch.manual_seed(0)
    net: Any = lpq.convert(nn.Sequential(make(), make()), recipe, weights=weights, **how)
    for block in net:
        if unit:
            fully_shard(block.inner)
        fully_shard(block)
    return fully_shard(net)


def _trained(net: Any, weights: Any, kept: list[Tensor] | None = None) -> list[Tensor]:
    """Take three steps; ``kept`` gets the ordinary tensors that the last one's forward keeps for backward."""
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = MasterWeights(optimizer, keep=False) if weights == "quantized" else optimizer
    found = []
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()).dtype)
        torch.manual_seed(step)  # of random bits
        y = net(x) if kept is None else _noting(net, x, kept)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.to_local() for p in net.parameters() if isinstance(p.grad, DTensor))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(b.clone() for _, b in net.named_buffers(remove_duplicate=False))]  # norms share histories


# ---------------------------------------------------------------------------------- siblings


def _noting(net: nn.Module, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y: Tensor = net(x)
    assert _memories(kept, torch.float32, OF_W) in ({0}, set())
    return y


def _memories(kept: list[Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> set[int]:
    """The bytes that tensors of this shape have now."""
    return {t.untyped_storage().nbytes() for t in kept if t.dtype == dtype and tuple(t.shape) == shape}


@on_ranks(2)
def test_a_gathered_weight_that_is_kept_takes_no_memory_meanwhile(rank: int) -> None:
    """FSDP2 frees it after forward, and gathers it again for backward. Its encoded form would stay."""
    recipe, kept = "fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8", list[Tensor]()
    usual = _trained(_sharded(product, recipe, None), None, kept)
    assert _memories(kept, torch.float8_e4m3fn, OF_W[::-1]) == {2 * WIDTH * WIDTH}
    assert equal(usual, _trained(_sharded(product, f"{recipe}, w.save=weight", None), None, kept))
    assert sum(t.shape == OF_W for t in kept) == 4


@on_ranks(2)
def test_siblings_encode_once(rank: int) -> None:
    for weights in (None, "high_precision", "quantized"):
        found = []
        for apart in (False, True):
            net = _sharded(product, "mxfp8", weights)
            for module in net.modules() if apart else ():
                if isinstance(module, Layer):
                    module.join(replace(module.model, inputs=SharedInputs()))
            with pytest.MonkeyPatch.context() as patch:
                seen = encodings(patch)
                found.append(_trained(net, weights))
            counts = Counter(w.shape for w in seen if w.dtype == torch.float32 and w.col)
            dys = counts[OF_X] - (12 if apart else 6)  # that of out has the shape of an input
            assert dys == 6, (weights, apart, counts)
        assert equal(*found), weights


# ---------------------------------------------------------------------------------- blocks and norms


@pytest.mark.parametrize(
    ("recipe", "weights", "others", "unit"),
    [
        ("fp8-current", None, False, False), ("fp8-delayed", "high_precision", False, False),
        ("nvfp4", "high_precision", False, False), ("mxfp8", "quantized", False, False),
        # another library's block, which may be a unit
        ("fp8-current", None, True, True), ("fp8-current", "high_precision", True, True),
        *(("mxfp8", weights, True, False) for weights in (None, "high_precision", "quantized")),
    ],
)  # fmt: skip
@on_ranks(2)
def test_swiglu(rank: int, recipe: str, weights: Any, others: bool, unit: bool) -> None:
    found = []
    for fused in (True, False):
        inner: Callable[[], nn.Module] = LlamaMlp if others or not fused else lambda: SwiGLU(WIDTH, 2 * WIDTH)
        net = _sharded(lambda: Block(inner()), recipe, weights, unit, fuse=fused)  # noqa: B023
        reports = [lpq.report(net)] if others and fused else []
        found.append(_trained(net, weights))
        assert net[0].is_fused == fused
        names = ["0.inner", "1.inner"] if unit else ["0.norm", "0.inner", "1.norm", "1.inner"]  # a unit has hooks
        for report in (*reports, lpq.report(net)) if reports else ():
            assert [entry.name for entry in report.fused] == names, report.apart
    assert equal(*found)


@on_ranks(2)
def test_norms_that_add_the_residual(rank: int) -> None:
    added, own = list[bool](), norms.EncodedNorm.forward

    def forward(ctx: Any, *args: Any) -> Any:
        added.append(args[-2] is not None)
        return own(ctx, *args)

    for weights in (None, "high_precision", "quantized"):
        found = []
        for fuse in (False, True):
            added.clear()
            net = _sharded(stream, "fp8-current", weights, fuse=fuse)
            assert all(isinstance(block, ResidualLayer) == fuse for block in net)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(norms.EncodedNorm, "forward", staticmethod(forward))
                found.append(_trained(net, weights))
            assert added == ([False, True, False, True] * 3 if fuse else []), (weights, fuse, str(lpq.report(net)))
            notes = [entry.note for entry in lpq.report(net).fused]
            assert len(notes) == (4 if fuse else 0)
            assert ["it adds the residual, and" in note for note in notes] == [False, True] * (len(notes) // 2)
        assert equal(*found), weights


def stream() -> nn.Module:
    return Stream(nn.RMSNorm, WIDTH, False, bias=False).bfloat16()


class Router(nn.Module):
    """Multiplies by a parameter of its own, as routers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Apart(nn.Module):
    """Norms whose output is not encoded: it is used elsewhere, goes to a layer that runs twice, or to a router."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.twice, self.routed = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH)
        self.left, self.right, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Router()

    def forward(self, x: Tensor) -> Tensor:
        y = self.right(self.left(self.other(x).sin()) + self.twice(x))
        z: Tensor = self.right(self.twice(x)) + y + self.router(self.routed(x))
        return z


@on_ranks(2)
def test_the_reasons_of_norms_that_are_not_fused_stay(rank: int) -> None:
    for weights in (None, "high_precision"):
        net: Any = lpq.convert(nn.Sequential(Apart()), "mxfp8", weights=weights, fuse=True)
        before = lpq.report(net).apart
        assert [entry.name for entry in before] == ["0.other", "0.twice", "0.routed"]
        for module in (net[0].other, net[0], net):  # a norm may be a unit of its own
            fully_shard(module)
        after = lpq.report(net).apart
        assert [(entry.name, entry.note) for entry in after] == [(entry.name, entry.note) for entry in before]
