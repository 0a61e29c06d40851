"""``MasterWeights(…, keep=False)``: masters for the length of a step, so that any optimizer writes and reduces once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from operands import same
from ranks import spawn
from sharded import How, batch, built, model
from stored import RECIPES, W8, Way, converted, local, parts, same_parts, sharded, step
from test_optimizers import Muon
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": lambda params: AdamW(params, lr=1e-2, foreach=True),
    "one by one": lambda params: AdamW(params, lr=1e-2, foreach=False),
    "fused": lambda params: AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
}


def _passing(net: nn.Module, kind: str = "foreach") -> MasterWeights:
    return MasterWeights(OPTIMIZERS[kind](net.parameters()), keep=False)


def _run(net: nn.Sequential, optimizer: Optimizer, numbers: range = range(3)) -> list[float]:
    return [step(net, optimizer, number, Way("")) for number in numbers]


def _bytes(net: nn.Module) -> list[dict[str, Tensor]]:
    return [parts(local(p.detach())) for p in net.parameters()]


def _equal(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def _one_reduction_a_step(rank: int) -> None:
    """Negative control: the optimizer alone makes more."""
    for recipe, count in (("fp8-current", 1), (W8.format("nvfp4(block=16x16)"), 1), ("mxfp8", 0)):
        for kind in OPTIMIZERS:
            for passing in (True, False):
                net = sharded(converted(recipe))
                optimizer = _passing(net, kind) if passing else OPTIMIZERS[kind](net.parameters())
                for number in range(2):
                    net(torch.randn(32, 256)).square().mean().backward()
                    with collectives() as seen:
                        optimizer.step()
                    kinds = [c.kind for c in seen]
                    assert set(kinds) <= {"all_reduce"}
                    if passing or kind == "fused" or not count:
                        assert len(kinds) == count, (recipe, kind, number)
                    else:
                        assert len(kinds) > count, (recipe, kind, number)


def _as_unsharded(rank: int) -> None:
    for recipe in RECIPES:
        for kind in OPTIMIZERS if recipe in RECIPES[:1] else ["foreach"]:
            for bf16 in (False, True):
                way = Way(recipe, bf16=bf16)
                alone, ours = converted(recipe, bf16), sharded(converted(recipe, bf16))
                found = []
                for net in (alone, ours):
                    optimizer = _passing(net, kind)
                    found.append([step(net, optimizer, number, way) for number in range(3)])
                assert found[0] == found[1], (recipe, kind)
                assert len(set(found[0])) == 3
                same_parts(ours, alone, (recipe, kind))


def _as_the_optimizer_alone_where_that_writes_once(rank: int) -> None:
    """A fused one does. With masters that are kept it is another run."""
    for recipe in RECIPES[:3]:
        runs = []
        for make in (lambda o: o, lambda o: MasterWeights(o, keep=False), MasterWeights):
            net = sharded(converted(recipe))
            runs.append((_run(net, make(OPTIMIZERS["fused"](net.parameters()))), _bytes(net)))
        assert runs[0][0] == runs[1][0] != runs[2][0], recipe
        assert _equal(runs[0][1], runs[1][1]), recipe
        assert not _equal(runs[0][1], runs[2][1]), recipe


def _nothing_is_kept(rank: int) -> None:
    net = sharded(converted("fp8-current"))
    optimizer = _passing(net)
    params = [p for group in optimizer.optimizer.param_groups for p in group["params"]]

    def held() -> int:
        pairs = zip(params, net.parameters(), strict=True)
        return sum(local(p).untyped_storage().size() for p, weight in pairs if p is not weight)

    inside: list[int] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: inside.append(held()))
    assert held() == 0
    _run(net, optimizer)
    assert held() == 0
    assert inside == [4 * 4 * 128 * 256] * 3
    assert optimizer.masters == {}
    assert not any("master" in state for state in optimizer.state_dict()["state"].values())


def _what_is_written_in_between_counts(rank: int) -> None:
    """The weights are the only truth: writing to them needs nobody's leave."""
    for shard in (True, False):
        net = sharded(converted("fp8-current")) if shard else converted("fp8-current")
        optimizer = _passing(net)
        _run(net, optimizer)
        with torch.no_grad():
            net[0].up.weight.mul_(2)
        before = _bytes(net)
        optimizer.take(net[0].up.weight)  # a step does that
        optimizer.step()  # nothing has a gradient
        assert _equal(_bytes(net), before)
        load_high_precision(net, {name: p / 2 for name, p in model(256, 256).state_dict().items()})
        _run(net, optimizer)


class Mishap(Exception):
    """What goes wrong in a step."""


def _fail(*_: Any) -> None:
    raise Mishap


def _a_step_that_raises(rank: int) -> None:
    """It leaves the stored weights as they were, and the next one is as if nothing had been."""
    for kind in ("one by one", "foreach"):
        found = []
        for unlucky in (True, False):
            net = sharded(converted("fp8-current"))
            optimizer = _passing(net, kind)
            _run(net, optimizer, range(1))
            net(batch(1, How("", width=256))).square().mean().backward()
            inner = optimizer.optimizer
            for hook in (inner.register_step_pre_hook, inner.register_step_post_hook) if unlucky else ():
                others = [p for p in net.parameters() if not isinstance(local(p), QuantizedTensor)]
                before, state = _bytes(net), copy.deepcopy(optimizer.state_dict())
                values = [p.detach().clone() for p in others]
                handle = hook(_fail)
                with pytest.raises(Mishap):
                    optimizer.step()
                handle.remove()
                with torch.no_grad():  # parameters that are not quantized, and moments, are the optimizer's own affair
                    for p, value in zip(others, values, strict=True):
                        p.copy_(value)
                optimizer.load_state_dict(state)
                assert _equal(_bytes(net), before), kind
            optimizer.step()
            found.append(_bytes(net))
        assert _equal(*found), kind


def _a_closure(rank: int) -> None:
    found = []
    for closed in (False, True):
        net = sharded(converted("fp8-current"))
        optimizer, losses = _passing(net), []
        for number in range(3):

            def loss(net: nn.Module = net, number: int = number, optimizer: Optimizer = optimizer) -> float:
                optimizer.zero_grad()
                found = net(batch(number, How("", width=256))).square().mean()
                found.backward()
                return float(found)

            if closed:
                losses.append(optimizer.step(loss))
            else:
                losses.append(loss())
                optimizer.step()
        found.append((losses, _bytes(net)))
    assert found[0][0] == found[1][0]
    assert _equal(found[0][1], found[1][1])


def _other_optimizers(rank: int) -> None:
    """One that wants whole matrices and that torch does not know; and groups that are added later."""
    how = How("fp8-current", weights="quantized", width=64, inner=128)
    found = []
    for one in (how, replace(how, shard=False)):
        net = built(one)
        params = list(net.parameters())
        optimizer = MasterWeights(Muon(params[:3]), keep=False)
        optimizer.add_param_group({"params": params[3:], "lr": 0.01})
        for number in range(3):
            net(batch(number, how)).square().mean().backward()
            with collectives() as seen:
                optimizer.step()
            optimizer.zero_grad()
            assert [c.kind for c in seen].count("all_reduce") == int(one.shard)
        found.append(net)
    same_parts(*found, "Muon")


def _state(rank: int, folder: str) -> None:
    """By torch's state dicts and by a checkpoint; of a run that goes on, and of one with other masters."""
    for kind in ("foreach", "momentum"):
        net = sharded(converted("fp8-current"))
        optimizer = _passing(net, kind)
        _run(net, optimizer)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        lpq.checkpoint.save(Path(folder) / kind, net, optimizer, step=3)
        uninterrupted = _run(net, optimizer, range(3, 5)), _bytes(net)

        def loaded(net: nn.Sequential, optimizer: Optimizer, saved: Any = saved, kind: str = kind) -> None:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

        def resumed(net: nn.Sequential, optimizer: Optimizer, kind: str = kind) -> None:
            lpq.checkpoint.load(Path(folder) / kind, net, optimizer)

        for load in (loaded, resumed):
            other = sharded(converted("fp8-current"))
            its = _passing(other, kind)
            if load is loaded:
                _run(other, its, range(9, 10))
            load(other, its)
            assert _run(other, its, range(3, 5)) == uninterrupted[0], (kind, load)
            assert _equal(_bytes(other), uninterrupted[1]), (kind, load)

    # masters that were kept are left out, and those of nobody start from the weights
    net = sharded(converted("fp8-current"))
    kept = MasterWeights(OPTIMIZERS["foreach"](net.parameters()))
    _run(net, kept)
    before = _bytes(net)
    passing = _passing(net)
    passing.load_state_dict(kept.state_dict())
    assert _equal(_bytes(net), before)
    moments = [s["exp_avg"].full_tensor() for s in passing.state_dict()["state"].values()]
    others = [s["exp_avg"].full_tensor() for s in kept.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))
    assert len(moments) == len(list(net.parameters()))
    lpq.checkpoint.save(Path(folder) / "kept", net, kept, step=3)
    with pytest.warns(UserWarning, match="the fp32 masters of 4 weights are left out"):
        lpq.checkpoint.load(Path(folder) / "kept", net, passing)
    _run(net, passing)


def _two_ranks(rank: int, folder: str) -> None:
    _one_reduction_a_step(rank)
    _as_unsharded(rank)
    _as_the_optimizer_alone_where_that_writes_once(rank)
    _nothing_is_kept(rank)
    _what_is_written_in_between_counts(rank)
    _a_step_that_raises(rank)
    _a_closure(rank)
    _other_optimizers(rank)
    _state(rank, folder)


def test_two_ranks(tmp_path: Path) -> None:
    spawn(_two_ranks, 2, str(tmp_path))
