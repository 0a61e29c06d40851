"""Any optimizer: several for one model, one that works on whole weights, one that torch does not know of, a closure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import fully_shard, of_all, on_ranks
from sharded import (
    OPTIMIZERS,
    SMALL,
    How,
    backward,
    batch,
    built,
    model,
    optimizer_for,
    same_parts,
    same_weights,
    whole,
)
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import Collective, collectives
from lpq.optim import MasterWeights
from lpq.tensor import encode_writes

RECIPES = ["fp8-current", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "fp8-delayed"]
STEPS = 3
Update = Callable[[int], None]


class Muon(Optimizer):
    """An optimizer that wants whole matrices: it gathers gradients, orthogonalises and cuts them again."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = whole(p.grad)
                x = g / (g.norm() + 1e-7) if g.dim() == 2 else g
                for _ in range(3 if g.dim() == 2 else 0):
                    x = 1.5 * x - 0.5 * (x @ x.t()) @ x
                if isinstance(p, DTensor):
                    x = distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(x, alpha=-group["lr"])


def _stepping(optimizer: Optimizer) -> Optimizer:
    """It steps stored weights too."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stored = any(isinstance(getattr(p, "_local_tensor", p), QuantizedTensor) for p in params)
    return MasterWeights(optimizer, keep=False) if stored else optimizer


def _stepped(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _two(net: nn.Module) -> Update:
    """AdamW for some layers; SGD for the others, which steps every second time."""
    ups = [p for name, p in net.named_parameters() if ".up." in name]
    others = [p for name, p in net.named_parameters() if ".up." not in name]
    adam, sgd = _stepping(AdamW(ups, lr=1e-2)), _stepping(SGD(others, lr=0.1, momentum=0.9))
    return lambda number: _stepped(adam, *[sgd] * (number % 2))


def _muon(net: nn.Module) -> Update:
    """With a group that is added later."""
    params = list(net.parameters())
    optimizer = _stepping(Muon(params[:3]))
    optimizer.add_param_group({"params": params[3:], "lr": 0.01})
    return lambda number: _stepped(optimizer)


def _unknown(net: nn.Module) -> Update:
    """No optimizer at all: nothing tells that the weights were written to, but the writes themselves."""

    def update(number: int) -> None:
        for p in net.parameters():
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None

    return update


def _masters(net: nn.Module) -> Update:
    """Two optimizers with masters."""
    params = list(net.parameters())
    optimizers = MasterWeights(AdamW(params[::2], lr=1e-2)), MasterWeights(SGD(params[1::2], lr=0.1))
    return lambda number: _stepped(*optimizers)


def _run(how: How, make: Callable[[nn.Module], Update]) -> tuple[list[float], nn.Module, list[list[int]]]:
    """The losses, the model, and how often each forward and each update reduce."""
    net = built(how)
    update = make(net)
    losses, counted = [], []
    for number in range(STEPS):
        x = batch(number, how)
        with collectives() as forward:
            loss = (net(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with collectives() as step:
            update(number)
        counted.append([_reductions(seen) for seen in (forward, step)])
    return losses, net, counted


def _reductions(seen: list[Collective]) -> int:
    return [c.kind for c in seen].count("all_reduce")


@on_ranks(2)
def test_as_with_ordinary_gathers(rank: int) -> None:
    """With the first recipe each kind of optimizer, with the others those that differ there."""
    for recipe, makes in zip(RECIPES, ((_two, _muon, _unknown), (_muon,), (_two, _unknown)), strict=True):
        for make in makes:
            how = How(recipe, **SMALL)
            ordinary, a, _ = _run(replace(how, weights=None), make)
            losses, b, counted = _run(how, make)
            assert ordinary == losses, (recipe, make)
            assert len(set(losses)) == STEPS
            same_weights(a, b, (recipe, make))
            if recipe == "fp8-current":  # only where no hook says that the weights are written, forward has to look
                looks, steps = int(make is _unknown), {_two: [1, 2, 1], _muon: [1] * 3, _unknown: [0] * 3}[make]
                assert counted == [[looks if number else 1, count] for number, count in enumerate(steps)]


@on_ranks(2)
def test_as_unsharded(rank: int) -> None:
    """Weights that are stored quantized, too; each optimizer reduces once."""
    for recipe, makes in zip(RECIPES[:2], ((_two, _muon, _masters), (_two,)), strict=True):
        for make in makes:
            how = How(recipe, weights="quantized", **SMALL)
            losses, net, counted = _run(how, make)
            alone, twin, _ = _run(replace(how, shard=False), make)
            assert losses == alone, (recipe, make)
            same_parts(net, twin, (recipe, make))
            steps = {_two: [1, 2, 1], _muon: [1] * 3, _masters: [2] * 3}[make]
            assert counted == [[0, count] for count in steps], (recipe, make)


class _Around(Optimizer):
    """Wraps optimizers that have all its parameters, and steps them."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


def _halves(net: nn.Module) -> Optimizer:
    """Two within another one."""
    params = list(net.parameters())
    return _Around(_stepping(AdamW(params[::2], lr=1e-2)), _stepping(AdamW(params[1::2], lr=1e-2)))


def _adam(net: nn.Module) -> Optimizer:
    return _stepping(AdamW(net.parameters(), lr=1e-2))


def _both_kinds(recipe: str) -> nn.Sequential:
    """Weights that are stored and weights that are gathered quantized."""
    net = model(64, 128)
    for block, weights in zip(net, ("quantized", "high_precision"), strict=True):
        lpq.convert(block, recipe, weights=weights)  # type: ignore[arg-type]
    for block in (*net, net):
        fully_shard(block)
    return net


def _own(rank: int) -> Tensor:
    """A batch that the other rank does not see."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))


def _histories(net: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in net.named_buffers() if "history" in name]


def _agree(values: list[Tensor]) -> bool:
    """Whether they are the same on both ranks."""
    return equal(*of_all(values))


@on_ranks(2)
def test_both_kinds_of_weights_reduce_once(rank: int) -> None:
    """With what delayed scaling remembers."""
    makes: list[tuple[Callable[[nn.Module], Optimizer], int]] = [
        (_adam, 1), (_halves, 3), (lambda net: MasterWeights(AdamW(net.parameters(), lr=1e-2)), 1)
    ]  # fmt: skip
    for recipe in ("fp8-current", "fp8-delayed"):
        for make, wanted in makes:
            net = _both_kinds(recipe)
            optimizer = make(net)
            for number in range(2):
                with collectives() as seen:
                    net(_own(rank)).square().mean().backward()
                assert _reductions(seen) == int(not number), (recipe, number)  # weights that no step has written to
                before = [p.full_tensor() for p in net.parameters()]
                histories = _histories(net)
                assert not (histories and _agree(histories)), "or this says nothing"
                with collectives() as seen:
                    optimizer.step()
                optimizer.zero_grad()
                assert [c.kind for c in seen] == ["all_reduce"] * wanted, (recipe, number)
                assert len(_histories(net)) == (12 if recipe == "fp8-delayed" else 0)
                assert _agree(_histories(net))
                moved = [not torch.equal(a, p.full_tensor()) for a, p in zip(before, net.parameters(), strict=True)]
                assert sum(moved) >= 4


@on_ranks(2)
def test_an_encoding_that_raises_leaves_no_weight_half_measured(rank: int) -> None:
    """Weights beside it that each rank has measured, and none has reduced, are not encoded so in the next forward."""
    net = _both_kinds("fp8-current")
    optimizer = _adam(net)
    net(_own(rank)).square().mean().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_writes, "check_shard", lambda *_: 1 / 0)  # before a stored weight is measured
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    with collectives() as seen:
        out = net(torch.ones(32, 64))
    assert _reductions(seen) == 1
    assert _agree([out.detach()])


@on_ranks(2)
def test_another_step_within_a_step(rank: int) -> None:
    """An optimizer that is none of those which the other one wraps: what it has is not left out."""
    net = fully_shard(lpq.convert(model(64, 128), "fp8-delayed", weights="high_precision"))
    other = AdamW(net[1].parameters())

    def closure() -> Tensor:
        loss: Tensor = net(_own(rank)).square().mean()
        loss.backward()
        with collectives() as seen:
            other.step()
        assert [c.kind for c in seen] == ["all_reduce"]
        assert _agree(_histories(net[1]))
        assert not _agree(_histories(net[0]))
        return loss

    with collectives() as seen:
        AdamW(net[0].parameters()).step(closure)
    assert _reductions(seen) == 3, "the first forward, the other step, and this one"
    assert _agree(_histories(net))


@on_ranks(2)
def test_state_is_sharded_and_ordinary(rank: int) -> None:
    for weights in ("high_precision", "quantized"):
        how = How("fp8-current", weights=weights, **SMALL)
        net = built(how)
        optimizer = optimizer_for(how, net)
        backward(net, batch(0, how))
        optimizer.step()
        assert len(optimizer.state) == len(list(net.parameters()))
        for parameter, state in optimizer.state.items():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                assert isinstance(moment, DTensor)
                assert (moment.shape, moment.placements) == (parameter.shape, parameter.placements)
                assert type(moment._local_tensor) is Tensor
                assert moment._local_tensor.dtype == torch.float32
                assert moment._local_tensor.shape[0] * 2 == parameter.shape[0]


@on_ranks(2)
def test_a_closure(rank: int) -> None:
    for weights in ("high_precision", "quantized"):
        how, found = How("fp8-current", weights=weights, **SMALL), list[list[Any]]()
        for closed in (False, True):
            net = built(how)
            optimizer, losses = optimizer_for(how, net), []
            for number in range(3):

                def loss(net: Any = net, number: int = number, optimizer: Any = optimizer) -> float:
                    optimizer.zero_grad()
                    return backward(net, batch(number, how))  # noqa: B023

                losses.append(optimizer.step(loss) if closed else loss())
                if not closed:
                    optimizer.step()
            found.append(losses)
        assert found[0] == found[1]
        assert len(set(found[0])) == 3


@on_ranks(2)
def test_a_model_may_go_at_any_time(rank: int) -> None:
    """Also while torch calls the hooks of a step, when the garbage is collected there."""
    how = How("fp8-current", **SMALL)
    nets = [built(how) for _ in range(2)]
    for net in nets:
        backward(net, batch(0, how))
    optimizer = OPTIMIZERS["foreach"](nets[1].parameters())
    gone = weakref.ref(nets[0][0].up.model.fsdp)
    assert gone() is not None

    def collect(*_: Any) -> None:
        nets[0] = nets[1]
        gc.collect()

    del net
    optimizer.register_step_post_hook(collect)  # it runs before the hooks for all optimizers
    handle = register_optimizer_step_post_hook(collect)
    optimizer.step()
    handle.remove()
    assert gone() is None
