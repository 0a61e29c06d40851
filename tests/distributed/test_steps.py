"""Weights that are stored quantized are stepped through MasterWeights: without masters too each is rounded once a step,
and the statistics of all of them are reduced once. Anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, on_ranks
from sharded import (
    OPTIMIZERS,
    STORED,
    W8,
    backward,
    batch,
    built,
    bytes_of,
    enough,
    local,
    model,
    optimizer_for,
    parts,
    same_parts,
    step,
    stored,
)
from support.comparing import copy_bytes, equal, equal_states
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision
from lpq.torch_private.tensors import local_part

REDUCED = ["fp8-current", "fp8-delayed", *map(W8.format, ("nvfp4()", "hybrid(row=nvfp4, col=mxfp8, col_source=row)"))]
"""Formats with a statistic of the whole weight; the others need no reduction."""
FP8 = stored("fp8-current")
ALONE = replace(FP8, shard=False)


def stored_weights(net: nn.Module) -> list[Tensor]:
    return [p for p in net.parameters() if isinstance(local(p), QuantizedTensor)]


def rounding(optimizer: Optimizer) -> MasterWeights:
    """It keeps no masters."""
    return MasterWeights(optimizer, keep=False)


class Does(Optimizer):
    """Its step is a function of the parameter."""

    def __init__(self, params: Any, update: Callable[[Tensor], None]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p)


def reductions(optimizer: Optimizer) -> int:
    with collectives() as seen:
        optimizer.step()
    optimizer.zero_grad()
    assert {c.kind for c in seen} <= {"all_reduce"}
    return len(seen)


@on_ranks(2)
def test_one_reduction(rank: int) -> None:
    """All weights in one, with what delayed scaling remembers. As unsharded, bit for bit."""
    for recipe in [*REDUCED, "mxfp8"]:
        for name in OPTIMIZERS if recipe == REDUCED[0] else ["loop"]:
            how = stored(recipe, optimizer=OPTIMIZERS[name], blocks=1)
            ours, alone = nets = [built(replace(how, shard=shard)) for shard in (True, False)]
            optimizers = [optimizer_for(how, net) for net in nets]
            for number in range(enough(recipe)):
                for net in nets:
                    backward(net, batch(number, how))
                assert [*map(reductions, optimizers)] == [1, 0], (recipe, name, number)  # of what changed, too
                same_parts(ours, alone, (recipe, name, number))


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
        assert equal_states(parts(shard), parts(quantizer.quantize(3 * value)[64 * rank :][:64]))


@on_ranks(2)
def test_refused(rank: int) -> None:
    """On all ranks alike, by the name of the first weight; no weight has changed."""
    net = built(FP8)
    before = bytes_of(stored_weights(net))
    for make in OPTIMIZERS.values():
        backward(net, batch(0, FP8))
        words = r"^0\.up\.weight: \S+ would compute in place in this"
        with collectives() as seen, pytest.raises(RuntimeError, match=words):
            make(net.parameters()).step()
        assert not seen
        assert equal_states(bytes_of(stored_weights(net)), before)


@on_ranks(2)
def test_raises(rank: int) -> None:
    """The stored weights are what they were, the copies have no memory, and the next step goes on from them."""

    def unlucky(p: Tensor) -> None:
        p.mul_(3)
        if p is last[0]:
            raise ZeroDivisionError

    for how in (FP8, ALONE):
        net, twin = built(how), built(how)
        optimizer = rounding(Does(stored_weights(net), unlucky))
        last = [optimizer.optimizer.param_groups[0]["params"][-1]]
        before = bytes_of(net)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert equal_states(bytes_of(net), before)
        assert last[0].numel() > 1
        assert local(last[0]).untyped_storage().nbytes() == 4
        last[:] = [torch.ones(())]
        for one in (optimizer, rounding(Does(stored_weights(twin), lambda p: p.mul_(3)))):
            one.step()
        assert equal_states(bytes_of(net), bytes_of(twin))
        assert not equal_states(bytes_of(net), before)


@on_ranks(2)
def test_what_no_step_writes_to(rank: int) -> None:
    """A weight without a gradient stays as it is, to the bit; and weights may be written to between steps."""
    for how in (FP8, ALONE):
        net = built(how)
        optimizer = optimizer_for(how, net)
        step(net, optimizer, 0, how)
        with torch.no_grad():
            net[0].up.weight.fill_(2)
        before = bytes_of(net)
        optimizer.step()  # nothing has a gradient
        assert equal_states(bytes_of(net), before)
        halves = {name: p / 2 for name, p in model(how.width, how.inner).state_dict().items()}
        load_high_precision(net, halves, optimizer)
        step(net, optimizer, 1, how)
        assert not equal_states(bytes_of(net), before)


@on_ranks(2)
def test_what_a_hook_saves(rank: int, tmp_path: Path) -> None:
    """A checkpoint that a hook of the optimizer saves has what the step makes."""
    net, other = built(FP8), built(FP8)
    optimizer = optimizer_for(FP8, net)
    optimizer.register_step_post_hook(lambda *_: lpq.checkpoint.save(net, tmp_path / "run", step=1))
    step(net, optimizer, 0, FP8)
    lpq.checkpoint.load(other, tmp_path / "run")
    assert equal_states(bytes_of(other), bytes_of(net))


def test_rounded_once() -> None:
    """A weight is what an ordinary optimizer makes in fp32 of the stored one, encoded."""
    for recipe in STORED:
        quantizer = lpq.recipe(recipe).w
        for name in OPTIMIZERS if recipe == STORED[0] else ["loop"]:
            make, how = OPTIMIZERS[name], stored(recipe, shard=False, bf16=recipe == "mxfp8", blocks=1)
            net = built(how)
            weights = stored_weights(net)
            ordinary = [nn.Parameter(w.dequantize(torch.float32)) for w in weights]
            optimizer, reference = rounding(make(net.parameters())), make(ordinary)
            for number in range(enough(recipe)):
                backward(net, batch(number, how))
                before = bytes_of(net)
                for w, o in zip(weights, ordinary, strict=True):
                    o.data.copy_(w.dequantize(torch.float32))
                    o.grad = w.grad.float()
                optimizer.step()
                reference.step()
                assert not equal_states(bytes_of(net), before)
                for w, o in zip(weights, ordinary, strict=True):
                    expected = quantizer.quantize(o.detach(), col=w.col is not None)
                    assert equal_states(parts(w), parts(expected)), (recipe, name, number)
                optimizer.zero_grad()


# ---------------------------------------------------------------------------------- what a step does not change


def _net(recipe: str) -> Any:
    torch.manual_seed(16)  # with which nvfp4 gives what it decodes to other codes
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    return lpq.convert(net, recipe, weights="quantized", ranks=2)


def _bytes(net: nn.Module) -> list[Tensor]:
    held: list[Any] = [local_part(p) for p in net.parameters()]
    return [copy_bytes(buffer) for part in held for buffer in (part.buffers if hasattr(part, "buffers") else [part])]


def _stepped(recipe: str, net: Any) -> Any:
    """Steps that change nothing, and one that changes one element of the first weight, on the first rank."""
    optimizer = rounding(SGD(net.parameters(), lr=0.0))
    before = _bytes(net)
    for p in net.parameters() if recipe == "nvfp4" and not hasattr(net[0].weight, "device_mesh") else ():
        again = p.quantizer.quantize(p.dequantize(torch.float32))
        assert not equal(again.row.tensors(), p.row.tensors())
    gradients = [torch.zeros(p.shape) for p in net.parameters()]
    for rate, value in ((0.0, 1.0), (0.0, 0.0), (1.0, 1e3)):
        optimizer.param_groups[0]["lr"] = rate
        gradients[0][0, 0] = value
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            sharded = hasattr(p, "device_mesh")
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if sharded else gradient
        optimizer.step()
        assert equal(_bytes(net), before) == (not rate)
    half = len(before) // 2
    assert equal(_bytes(net)[half:], before[half:]), "no element of the second weight changed"
    return net


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
def test_a_step_that_changes_nothing_leaves_the_codes_as_they_are(recipe: str) -> None:
    _stepped(recipe, _net(recipe))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
@on_ranks(2)
def test_ranks_decide_as_one_process_does_what_a_step_changes(rank: int, recipe: str) -> None:
    whole, net = _stepped(recipe, _net(recipe)), _net(recipe)
    for layer in (*net, net):
        fully_shard(layer)
    for part, all_of_it in zip(_stepped(recipe, net).parameters(), whole.parameters(), strict=True):
        values = local_part(part).dequantize()
        rows = len(values)
        assert torch.equal(values, all_of_it.dequantize()[rank * rows :][:rows])
