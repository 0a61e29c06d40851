"""A step of any optimizer rounds each stored weight once, and reduces the statistics of all of them once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import same
from ranks import spawn
from sharded import How, batch, built, enough, model
from steps import WRITERS, Does, bytes_of, equal, give_gradients, reductions, step_apart, stored_weights
from stored import RECIPES, W8, Way, converted, local, parts, same_parts, sharded, step
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


def _one_reduction(rank: int) -> None:
    """All weights in one, with what delayed scaling remembers. As unsharded, bit for bit."""
    for recipe in [*REDUCED, "mxfp8"]:
        for kind, make in WRITERS.items():
            alone, ours = converted(recipe), sharded(converted(recipe))
            its, optimizer = make(alone.parameters()), make(ours.parameters())
            for number in range(enough(recipe)):
                give_gradients(alone, number)
                give_gradients(ours, number)
                assert reductions(its) == 0
                wanted = int(recipe != "mxfp8")
                assert reductions(optimizer) == wanted, (recipe, kind, number)
                same_parts(ours, alone, (recipe, kind, number))
    net = sharded(converted("fp8-current"))
    optimizer = WRITERS["loop"](net.parameters())
    give_gradients(net, 0)
    with collectives() as seen:
        step_apart(optimizer)
    assert len(seen) == 2 * len(stored_weights(net)), "the negative control reduces as often as it should not"


def _statistics_of_decoded_operands(rank: int) -> None:
    """A column operand that is kept encodes what the reduced row operand decodes to: two rounds, for all tensors."""
    quantizer = lpq.quantizer("hybrid(row=fp8, col=nvfp4, col_source=row)")
    values = [torch.randn(128, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    shards = [quantizer.quantize(v[64 * rank :][:64], amax_group=dist.group.WORLD) for v in values]
    with collectives() as seen:
        torch._foreach_mul_(shards, 3)
    assert len(seen) == 2
    for shard, value in zip(shards, values, strict=True):
        before = quantizer.quantize(value).dequantize()
        whole = quantizer.quantize(3 * before)
        assert same(parts(shard), parts(whole[64 * rank :][:64]))


def _rounded_once(rank: int) -> None:
    """A weight is what an ordinary optimizer makes in fp32 of the stored one, encoded; each write apart is another."""
    for recipe in RECIPES:
        quantizer = lpq.recipe(recipe).w
        for kind, make in WRITERS.items() if recipe in RECIPES[:1] else [("loop", WRITERS["loop"])]:
            net, control = converted(recipe), converted(recipe)
            weights = stored_weights(net)
            ordinary = [nn.Parameter(w.dequantize()) for w in weights]
            optimizer, reference, apart = make(net.parameters()), make(ordinary), make(control.parameters())
            writes_twice = kind in ("loop", "foreach", "nadam") and "identity(dtype=float32)" not in recipe
            for number in range(12):
                give_gradients(net, number)
                give_gradients(control, number)
                for w, o in zip(weights, ordinary, strict=True):
                    o.data.copy_(w.dequantize())
                    o.grad = w.grad.clone()
                optimizer.step()
                reference.step()
                step_apart(apart)
                for w, o in zip(weights, ordinary, strict=True):
                    expected = quantizer.quantize(o.detach(), col=w.col is not None)
                    assert same(parts(w.detach()), parts(expected)), (recipe, kind, number)
                optimizer.zero_grad()
                apart.zero_grad()
                if number >= 2 and (not writes_twice or not equal(bytes_of(net), bytes_of(control))):
                    break  # when the first element tells is another step on another processor
            assert equal(bytes_of(net), bytes_of(control)) != writes_twice, (recipe, kind, "the negative control")


def _in_bf16(rank: int) -> None:
    """The draft of a weight that is bf16 to PyTorch is in fp32 too, also where an operator wants one dtype of all."""
    quantizer, gradient = lpq.quantizer("fp8"), torch.randn(64, 64).bfloat16()
    weight = nn.Parameter(quantizer.quantize(torch.randn(64, 64).bfloat16()))
    expected = weight.dequantize(torch.float32).detach()
    moved = torch.zeros(64, 64, dtype=torch.bfloat16)

    def update(p: Tensor) -> None:
        for _ in range(100):
            p.mul_(0.999)  # nothing happens in bf16
        p.lerp_(gradient, 0.25)
        torch._foreach_addcmul_([p], [gradient], [gradient], 0.01)
        moved.lerp_(p, 0.5)  # reads it, in the dtype that it has

    Does([weight], update).step()
    for _ in range(100):
        expected.mul_(0.999)
    wide = gradient.float()
    expected.lerp_(wide, 0.25).addcmul_(wide, wide, value=0.01)
    assert same(parts(weight.detach()), parts(quantizer.quantize(expected)))
    assert torch.equal(moved, torch.zeros_like(moved).lerp_(expected.bfloat16(), 0.5))

    net = converted("fp8-current", bf16=True)
    optimizer = WRITERS["fused"](net.parameters())
    step(net, optimizer, 0, Way("", bf16=True))
    assert all(s["exp_avg"].dtype == torch.bfloat16 and s["exp_avg"].any() for s in optimizer.state.values())


def _variants_agree(rank: int) -> None:
    """Where torch's agree for ordinary weights: a loop and foreach do."""
    found = []
    for kind in ("loop", "foreach"):
        net = sharded(converted("fp8-current"))
        optimizer = WRITERS[kind](net.parameters())
        found.append(([step(net, optimizer, number, Way("")) for number in range(3)], bytes_of(net)))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


def _seeds(rank: int) -> None:
    """Random bits are drawn once for a weight in a step."""
    weight = nn.Parameter(lpq.quantizer("nvfp4(stochastic=True)").quantize(torch.randn(64, 64)))
    before = weight.dequantize().detach()
    torch.manual_seed(5)
    Does([weight], lambda p: p.mul_(0.9).mul_(1.1)).step()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with torch.no_grad():
        other = lpq.quantizer("nvfp4(stochastic=True)").quantize(torch.zeros(64, 64))
        torch.manual_seed(5)
        other.copy_(before * 0.9 * 1.1)
    assert same(parts(weight.detach()), parts(other))
    assert torch.equal(after, torch.get_rng_state())


def _masters(rank: int) -> None:
    """They write by themselves, at the end of their step."""
    for kind in ("loop", "fused"):
        net = sharded(converted("fp8-current"))
        optimizer = MasterWeights(WRITERS[kind](net.parameters()))
        for number in range(2):
            give_gradients(net, number)
            assert reductions(optimizer) == 1
        for weight, master in optimizer.masters.items():
            whole = lpq.quantizer("fp8").quantize(master.full_tensor(), col=False)
            assert same(parts(local(weight.detach())), parts(whole[128 * rank :][:128]))


def _outside_a_step(rank: int) -> None:
    """Each write encodes at once, and of a step nothing is left."""
    net = sharded(converted("fp8-current"))
    step(net, WRITERS["loop"](net.parameters()), 0, Way(""))
    for p in stored_weights(net):
        part = local(p)
        assert (part.draft.step, part.draft.matrix) == (None, None)
        with torch.no_grad(), collectives() as seen:
            p.mul_(0.9)
            p.mul_(1.1)
        assert len(seen) == 2


def _a_part_of_another_tensor(rank: int) -> None:
    """As a parameter, it has no draft of its own: the rest of the tensor stays as it is, wherever it can."""
    for text in ("fp8", "mxfp8"):
        whole, twin = (lpq.quantizer(text).quantize(torch.eye(64)) for _ in range(2))
        rest = parts(whole[32:].clone())
        parameter = nn.Parameter(whole[:32])
        Does([parameter], lambda p: p.mul_(1.5).add_(0.3)).step()
        twin[:32].mul_(1.5)
        twin[:32].add_(0.3)
        assert same(parts(whole), parts(twin))
        assert same(parts(whole[32:]), rest) == (text == "mxfp8")


def _other_optimizers(rank: int) -> None:
    """One that wants whole matrices and that torch does not know; and groups that are added later."""
    found = []
    for shard in (True, False):
        how = How("fp8-current", weights="quantized", width=64, inner=128, shard=shard)
        net = built(how)
        params = list(net.parameters())
        optimizer = Muon(params[:3])
        optimizer.add_param_group({"params": params[3:], "lr": 0.01})
        for number in range(3):
            net(batch(number, how)).square().mean().backward()
            with collectives() as seen:
                optimizer.step()
            optimizer.zero_grad()
            assert [c.kind for c in seen].count("all_reduce") == int(shard)
        found.append(net)
    same_parts(*found, "Muon")


def _what_no_step_writes_to(rank: int) -> None:
    """A weight without a gradient stays as it is, to the bit; and weights may be written to between steps."""
    for shard in (True, False):
        net = sharded(converted("fp8-current")) if shard else converted("fp8-current")
        optimizer = WRITERS["loop"](net.parameters())
        step(net, optimizer, 0, Way(""))
        with torch.no_grad():
            net[0].up.weight.mul_(2)
        before = bytes_of(net)
        optimizer.step()  # nothing has a gradient
        assert equal(bytes_of(net), before)
        load_high_precision(net, {name: p / 2 for name, p in model(256, 256).state_dict().items()})
        step(net, optimizer, 1, Way(""))
        assert not equal(bytes_of(net), before)


def _goes_on(rank: int, folder: str) -> None:
    """A run that is loaded, by torch's state dicts or from a checkpoint, is the one that was saved."""
    for kind in ("loop", "momentum"):

        def begun(kind: str = kind) -> tuple[nn.Sequential, Optimizer]:
            net = sharded(converted("fp8-current"))
            return net, WRITERS[kind](net.parameters())

        def run(net: nn.Sequential, optimizer: Optimizer, numbers: range) -> list[float]:
            return [step(net, optimizer, number, Way("")) for number in numbers]

        net, optimizer = begun()
        run(net, optimizer, range(3))
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        lpq.checkpoint.save(Path(folder) / kind, net, optimizer, step=3)
        losses = run(net, optimizer, range(3, 5))

        def loaded(net: nn.Sequential, optimizer: Optimizer, saved: Any = saved) -> None:
            run(net, optimizer, range(9, 10))
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

        def resumed(net: nn.Sequential, optimizer: Optimizer, kind: str = kind) -> None:
            lpq.checkpoint.load(Path(folder) / kind, net, optimizer)

        for load in (loaded, resumed):
            other = begun()
            load(*other)
            assert run(*other, range(3, 5)) == losses, (kind, load)
            assert equal(bytes_of(other[0]), bytes_of(net)), (kind, load)

    kept = sharded(converted("fp8-current"))
    masters = MasterWeights(WRITERS["loop"](kept.parameters()))
    step(kept, masters, 0, Way(""))
    lpq.checkpoint.save(Path(folder) / "masters", kept, masters, step=1)
    with pytest.warns(UserWarning, match="the fp32 masters of 4 weights are left out"):
        lpq.checkpoint.load(Path(folder) / "masters", *begun("loop"))


@pytest.mark.parametrize(
    "check",
    [
        _one_reduction,
        _statistics_of_decoded_operands,
        _rounded_once,
        _in_bf16,
        _variants_agree,
        _seeds,
        _masters,
        _outside_a_step,
        _a_part_of_another_tensor,
        _other_optimizers,
        _what_no_step_writes_to,
    ],
)
def test_two_ranks(check: Callable[[int], None]) -> None:
    spawn(check, 2)


def test_a_run_goes_on(tmp_path: Path) -> None:
    spawn(_goes_on, 2, str(tmp_path))
