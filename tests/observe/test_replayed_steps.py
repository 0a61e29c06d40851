"""Steps that are replayed by the states, the fused layers and the observers that they had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn
from torch.nn import functional as F

import lpq
from lpq.nn.observing import unobserved
from lpq.observe.culprits import in_bf16
from lpq.observe.replay import Before, Replay

DELAYED = "scaling=delayed, fresh=measure"
MEASURED = f"x=fp8({DELAYED}), w=fp8({DELAYED}), dy=fp8({DELAYED}, dtype=e5m2)"


def model(recipe: str) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), recipe)


def closure_of(net: Any, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def batch(step: int) -> Tensor:
    """The last one is far beyond what the states remember."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)) * (1.0, 1.0, 1000.0)[step]


def trained(recipe: str, steps: int) -> Any:
    net = model(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(steps):
        closure_of(net, batch(step))()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("recipe", [MEASURED, "fp8-delayed"])
@pytest.mark.parametrize("step", [0, 2])
def test_each_replay_has_the_states_of_the_step(recipe: str, step: int) -> None:
    """Also behind replays by other recipes: states that steps have moved are recalled, and others are measured."""
    net = trained(recipe, step)
    closure, before = closure_of(net, batch(step)), Before(net)
    loss = float(closure().detach())
    gradients = [p.grad.clone() for p in net.parameters()]
    buffers, notes = {*map(id, net.buffers())}, [(m.passes.fresh, m.passes.borrowed) for m in net[::2]]
    replay = Replay(net, closure, before)
    with replay.running():
        for layers in (replay.layers, [net[0]], [net[2]]):
            replay.run({layer: in_bf16(layer, replay.layers[layer]) for layer in layers})
            again, anew = replay.run({})
            assert again == loss
            assert equal(anew, gradients)
    assert {*map(id, net.buffers())} == buffers  # a CUDA graph of the step writes to them
    assert [(m.passes.fresh, m.passes.borrowed) for m in net[::2]] == notes
    alone = trained(recipe, step)
    closure_of(alone, batch(step))()
    for part in (batch(2) * 3, batch(1)):  # micro-batches behind the search
        assert torch.equal(closure_of(net, part)(), closure_of(alone, part)())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_observers_of_a_step_are_not_told_of_its_replays(recipe: str) -> None:
    """The search may be inside of the step that is watched."""

    def watched(search: bool) -> Any:
        net = model(recipe)
        watch, closure = lpq.observe.numerics(net, every=1), closure_of(net, batch(0))
        with watch.step():
            before = Before(net)
            closure()
            if search:
                assert lpq.observe.culprits(net, closure, before=before).replays
        return watch.readings()

    readings = watched(search=True)
    assert readings
    assert readings == watched(search=False)


@pytest.mark.parametrize("inner_ends_first", [False, True])
def test_observers_of_other_threads_may_end_within_a_replay(inner_ends_first: bool) -> None:
    """They are not told of anything behind that. Others are, once all replays have ended."""

    class Names(list[str]):
        def observe(self, seen: lpq.observe.Observed) -> None:
            self.append(seen.name)

    net, ends, stays, later = model("mxfp8"), Names(), Names(), Names()
    layers = [net[0], net[2]]
    with ExitStack() as stays_open, ExitStack() as ended, ExitStack() as first, ExitStack() as second:
        ended.enter_context(lpq.observe.observing(net, ends))
        stays_open.enter_context(lpq.observe.observing(net, stays))
        first.enter_context(unobserved(layers))
        second.enter_context(unobserved(layers))
        ended.close()  # as another thread does it
        stays_open.enter_context(lpq.observe.observing(net, later))
        closure_of(net, batch(0))()
        assert (ends, stays, len(later)) == ([], [], 8)
        inner, outer = (second, first) if inner_ends_first else (first, second)
        inner.close()
        closure_of(net, batch(0))()
        assert (ends, stays, len(later)) == ([], [], 16)
        outer.close()
        closure_of(net, batch(0))()
        assert (ends, len(stays), len(later)) == ([], 8, 24)
    assert net[0].passes.observers == net[2].passes.observers == ()
    assert type(net[0].passes.observers) is tuple


class Block(nn.Module):
    """A feed-forward part, as ``lpq.fuse`` finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


class Residual(nn.Module):
    """The sum of a stream and a block behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.RMSNorm(64), Block()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.block(self.norm(x))
        return total


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed", "nvfp4"])
def test_a_step_of_fused_layers_is_replayed_to_the_bit(recipe: str, watched: bool) -> None:
    """Also one that ran layer by layer, as it was observed. Control: the two differ."""

    def gradients(fused: bool) -> tuple[bool | None, list[Tensor]]:
        torch.manual_seed(0)
        net: Any = lpq.convert(nn.Sequential(Residual(), Residual()), recipe, include="all")
        if fused:
            lpq.fuse(net)
        watch = lpq.observe.numerics(net, every=1 if watched else 2, step=0 if watched else 1)
        closure, before = closure_of(net, batch(0)), Before(net)
        with watch.step():
            closure()
        return lpq.observe.culprits(net, closure, before=before).replays, [p.grad for p in net.parameters()]

    replays, ours = gradients(fused=True)
    assert replays
    assert equal(ours, gradients(fused=False)[1]) == watched


def test_a_gradient_of_nan_is_no_gradient_of_0() -> None:
    net = model("mxfp8")
    closure = closure_of(net, 0 * batch(0))
    closure()
    gradient = net[0].weight.grad
    assert lpq.observe.culprits(net, closure).replays
    gradient[0, 0] = torch.nan
    assert lpq.observe.culprits(net, closure).replays is False


class Siblings(nn.Module):
    """Three layers with one input, of which a format may make NaN, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.index_fill(1, torch.tensor([0]), torch.inf)
        out: Tensor = self.out(self.q(x).tanh() * self.k(x).tanh() * self.v(x).tanh())
        return out


@pytest.mark.parametrize("planted", [("q",), ("q", "k"), ("q", "k", "v")], ids=len)
def test_each_layer_that_makes_a_nan_is_found(planted: tuple[str, ...]) -> None:
    """In bf16 the infinity becomes 1. No layer helps by itself where two make a NaN."""
    torch.manual_seed(0)
    exact = [{"match": name, "recipe": "bf16"} for name in "qkv" if name not in planted]
    net = lpq.convert(Siblings(), {"rules": [*exact, {"match": "*", "recipe": "mxfp8"}]}, include="all")
    for name in "qkv":
        net.get_submodule(name).requires_grad_(False)
    found = lpq.observe.culprits(net, closure_of(net, batch(0)), least=0.5)
    assert {one.layer for one in found.found} == {*planted}
    assert {one.part for one in found.parts if one.moved > 0.5} == {"fprop", "fprop.x"}
    found.promote(net, until=3)
    lpq.set_step(net, 1)
    assert closure_of(net, batch(0))().isfinite()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["fp8-delayed", MEASURED, "mxfp8"])
def test_layers_that_share_a_state_are_promoted_together(recipe: str, fused: bool) -> None:
    """Behind the promotion they share it again. Others are promoted alone."""
    torch.manual_seed(0)
    net: Any = lpq.convert(nn.Sequential(Residual(), Residual()), recipe, include="all")
    if fused:
        lpq.fuse(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    bf16, own = lpq.recipe("bf16"), net[0].block.up.recipe
    found = lpq.observe.Culprits((lpq.observe.Culprit("0.block.up", "", 1.0, bf16),), (), 0.1, 1.0, 1.0, True)
    shares = fused and recipe != "mxfp8"
    for step in range(6):
        lpq.set_step(net, step)
        recipes = [layer.recipe for layer in (net[0].block.up, net[0].block.gate, net[0].block.down, net[1].block.up)]
        assert recipes == ([bf16, bf16 if shares else own, own, own] if step in (2, 3) else [own] * 4)
        closure_of(net, batch(1) * (1 + step))()
        if step == 1:
            assert {*found.promoted(net)} == {"0.block.up", *(["0.block.gate"] if shares else [])}
            found.promote(net, until=4)
        optimizer.step()
        optimizer.zero_grad()


class Draws(nn.Module):
    """Between two layers it draws as many random numbers as there are tokens for an expert, which follow from the
    first layer's values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.first.recipe == lpq.recipe("bf16"):  # type: ignore[union-attr]
            torch.rand(1)
        x = self.last(x)
        self.masks.append(F.dropout(torch.ones_like(x)))
        return x * self.masks[-1]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers_have_their_random_bits_whatever_is_drawn_before(recipe: str) -> None:
    torch.manual_seed(0)
    net: Any = lpq.convert(Draws(), recipe)
    before, closure = Before(net), closure_of(net, batch(0))
    closure()
    found = lpq.observe.culprits(net, closure, before=before, least=0.0)
    assert found.replays
    assert len(net.masks) > 5
    assert all(torch.equal(mask, net.masks[0]) for mask in net.masks)
