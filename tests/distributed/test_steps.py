"""Weights that are stored quantized are stepped through MasterWeights: without masters too each is rounded once a step,
and the statistics of all of them are reduced once. Anything else is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, spawn
from sharded import How, batch, built, enough, model
from steps import WRITERS, Does, bytes_of, equal, give_gradients, reductions, rounding, stored_weights
from stored import RECIPES, W8, Way, converted, local, parts, same_parts, sharded, step
from support.comparing import equal_states
from test_optimizers import Muon
from torch import Tensor, nn
from torch.optim import Optimizer

import lpq
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision

REDUCED = [
    "fp8-current",
    "fp8-delayed",
    W8.format("nvfp4()"),
    W8.format("hybrid(row=nvfp4, col=mxfp8, col_source=row)"),
]
"""Formats with a statistic of the whole weight; the others need no reduction."""


@on_ranks(2)
def test_one_reduction(rank: int) -> None:
    """All weights in one, with what delayed scaling remembers. As unsharded, bit for bit."""
    for recipe in [*REDUCED, "mxfp8"]:
        for kind, make in WRITERS.items() if recipe == REDUCED[0] else [("loop", WRITERS["loop"])]:
            alone, ours = converted(recipe), sharded(converted(recipe))
            its, optimizer = rounding(make(alone.parameters())), rounding(make(ours.parameters()))
            for number in range(enough(recipe)):
                give_gradients(alone, number)
                give_gradients(ours, number)
                assert reductions(its) == 0
                assert reductions(optimizer) == 1, (recipe, kind, number)  # of what changed, too
                same_parts(ours, alone, (recipe, kind, number))


@on_ranks(2)
def test_statistics_of_decoded_operands(rank: int) -> None:
    """A column operand that is kept encodes what the reduced row operand decodes to: two rounds, for all tensors."""
    quantizer = lpq.quantizer("hybrid(row=fp8, col=nvfp4, col_source=row)")
    values = [torch.randn(128, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    shards = [quantizer.quantize(v[64 * rank :][:64], amax_group=dist.group.WORLD) for v in values]
    with collectives() as seen:
        torch._foreach_copy_(shards, [3 * v[64 * rank :][:64] for v in values])
    assert len(seen) == 2
    for shard, value in zip(shards, values, strict=True):
        whole = quantizer.quantize(3 * value)
        assert equal_states(parts(shard), parts(whole[64 * rank :][:64]))


@on_ranks(2)
def test_refused(rank: int) -> None:
    """On all ranks alike, by the name of the first weight; no weight has changed."""
    net = sharded(converted("fp8-current"))
    before = [parts(local(p.detach())) for p in stored_weights(net)]
    for make in WRITERS.values():
        give_gradients(net, 0)
        with (
            collectives() as seen,
            pytest.raises(RuntimeError, match=r"^0\.up\.weight: \S+ would compute in place in this"),
        ):
            make(net.parameters()).step()
        assert not seen
        assert equal([parts(local(p.detach())) for p in stored_weights(net)], before)


@on_ranks(2)
def test_raises(rank: int) -> None:
    """The stored weights are what they were, the copies have no memory, and the next step goes on from them."""

    def unlucky(p: Tensor) -> None:
        p.mul_(3)
        if p is last[0]:
            raise ZeroDivisionError

    for shard in (True, False):
        net, twin = (sharded(converted("fp8-current")) if shard else converted("fp8-current") for _ in range(2))
        optimizer = rounding(Does(stored_weights(net), unlucky))
        last = [optimizer.optimizer.param_groups[0]["params"][-1]]
        before = bytes_of(net)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert equal(bytes_of(net), before)
        assert last[0].numel() > 1
        assert local(last[0]).untyped_storage().nbytes() == 4
        last.clear()
        last.append(torch.ones(()))
        for one in (optimizer, rounding(Does(stored_weights(twin), lambda p: p.mul_(3)))):
            one.step()
        assert equal(bytes_of(net), bytes_of(twin))
        assert not equal(bytes_of(net), before)


def _saved_by_a_hook(rank: int, folder: str) -> None:
    """A checkpoint that a hook of the optimizer saves has what the step makes."""
    net, other = sharded(converted("fp8-current")), sharded(converted("fp8-current"))
    optimizer = rounding(WRITERS["loop"](net.parameters()))
    optimizer.register_step_post_hook(lambda *_: lpq.checkpoint.save(net, folder, step=1))
    give_gradients(net, 0)
    optimizer.step()
    lpq.checkpoint.load(other, folder)
    assert equal(bytes_of(other), bytes_of(net))


@on_ranks(2)
def test_masters(rank: int) -> None:
    """A rank's part of a weight is that of its whole master, encoded."""
    for kind in ("loop", "fused"):
        net = sharded(converted("fp8-current"))
        optimizer = MasterWeights(WRITERS[kind](net.parameters()))
        for number in range(2):
            give_gradients(net, number)
            assert reductions(optimizer) == 1
        for weight, master in optimizer.masters.items():
            whole = lpq.quantizer("fp8").quantize(master.full_tensor(), col=False)
            assert equal_states(parts(local(weight.detach())), parts(whole[128 * rank :][:128]))


@on_ranks(2)
def test_other_optimizers(rank: int) -> None:
    """One that wants whole matrices and that torch does not know; and groups that are added later."""
    found = []
    for shard in (True, False):
        how = How("fp8-current", weights="quantized", width=64, inner=128, shard=shard)
        net = built(how)
        params = list(net.parameters())
        optimizer = rounding(Muon(params[:3]))
        optimizer.add_param_group({"params": params[3:], "lr": 0.01})
        for number in range(3):
            net(batch(number, how)).square().mean().backward()
            with collectives() as seen:
                optimizer.step()
            optimizer.zero_grad()
            assert [c.kind for c in seen].count("all_reduce") == int(shard)
        found.append(net)
    same_parts(*found, "Muon")


@on_ranks(2)
def test_what_no_step_writes_to(rank: int) -> None:
    """A weight without a gradient stays as it is, to the bit; and weights may be written to between steps."""
    for shard in (True, False):
        net = sharded(converted("fp8-current")) if shard else converted("fp8-current")
        optimizer = rounding(WRITERS["loop"](net.parameters()))
        step(net, optimizer, 0, Way(""))
        with torch.no_grad():
            net[0].up.weight.fill_(2)
        before = bytes_of(net)
        optimizer.step()  # nothing has a gradient
        assert equal(bytes_of(net), before)
        load_high_precision(net, {name: p / 2 for name, p in model(256, 256).state_dict().items()}, optimizer)
        step(net, optimizer, 1, Way(""))
        assert not equal(bytes_of(net), before)


def _goes_on(rank: int, folder: str) -> None:
    """A run that is loaded, by torch's state dicts or from a checkpoint, is the one that was saved."""
    for kind in ("loop", "momentum"):

        def begun(kind: str = kind) -> tuple[nn.Sequential, Optimizer]:
            net = sharded(converted("fp8-current"))
            return net, rounding(WRITERS[kind](net.parameters()))

        def run(net: nn.Sequential, optimizer: Optimizer, numbers: range) -> list[float]:
            return [step(net, optimizer, number, Way("")) for number in numbers]

        net, optimizer = begun()
        run(net, optimizer, range(3))
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        assert not any("master" in state for state in saved[1]["state"].values())
        lpq.checkpoint.save(net, Path(folder) / kind, optimizer, step=3)
        losses = run(net, optimizer, range(3, 5))

        def loaded(net: nn.Sequential, optimizer: Optimizer, saved: Any = saved) -> None:
            run(net, optimizer, range(9, 10))
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

        def resumed(net: nn.Sequential, optimizer: Optimizer, kind: str = kind) -> None:
            lpq.checkpoint.load(net, Path(folder) / kind, optimizer)

        for load in (loaded, resumed):
            other = begun()
            load(*other)
            assert run(*other, range(3, 5)) == losses, (kind, load)
            assert equal(bytes_of(other[0]), bytes_of(net)), (kind, load)

    kept = sharded(converted("fp8-current"))
    masters = MasterWeights(WRITERS["loop"](kept.parameters()))
    step(kept, masters, 0, Way(""))
    lpq.checkpoint.save(kept, Path(folder) / "masters", masters, step=1)
    other, optimizer = begun("loop")
    with pytest.warns(UserWarning, match="the fp32 masters of 4 weights are left out"):
        lpq.checkpoint.load(other, Path(folder) / "masters", optimizer)


@pytest.mark.parametrize("check", [_goes_on, _saved_by_a_hook])
def test_what_is_saved(check: Callable[[int, str], None], tmp_path: Path) -> None:
    spawn(check, 2, str(tmp_path))


def test_rounded_once() -> None:
    """A weight is what an ordinary optimizer makes in fp32 of the stored one, encoded."""
    for recipe in RECIPES:
        quantizer = lpq.recipe(recipe).w
        for kind, make in WRITERS.items() if recipe in RECIPES[:1] else [("loop", WRITERS["loop"])]:
            net = converted(recipe, bf16=recipe == "mxfp8")
            weights = stored_weights(net)
            ordinary = [nn.Parameter(w.dequantize(torch.float32)) for w in weights]
            optimizer, reference = rounding(make(net.parameters())), make(ordinary)
            for number in range(3):
                give_gradients(net, number)
                before = bytes_of(net)
                for w, o in zip(weights, ordinary, strict=True):
                    o.data.copy_(w.dequantize(torch.float32))
                    o.grad = w.grad.float()
                optimizer.step()
                reference.step()
                assert not equal(bytes_of(net), before)
                for w, o in zip(weights, ordinary, strict=True):
                    expected = quantizer.quantize(o.detach(), col=w.col is not None)
                    assert equal_states(parts(w.detach()), parts(expected)), (recipe, kind, number)
                optimizer.zero_grad()
