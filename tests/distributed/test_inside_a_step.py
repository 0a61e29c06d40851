"""Inside a step: views, reads, forwards, checkpoints, threads and compiled code see what it wrote; one that raises did
not."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import same
from ranks import spawn
from steps import WRITERS, Does, bytes_of, equal, give_gradients, stored_weights
from stored import W8, converted, local, parts, same_parts, sharded
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives


def _through_aliases(p: Tensor, kept: Tensor) -> None:
    """Every alias is of one draft; ``kept`` is a view that was there before the step."""
    p.mul_(0.7)
    p.data.add_(0.01)
    p.detach().mul_(1.3)
    part = local(p)
    kept.sub_(0.02)
    part[:32].mul_(2)
    part[:, 32:64].add_(0.05)
    part[32:96][32:, :64].mul_(0.5)
    part.view(-1).add_(0.01)
    part.view(4, -1, 256)[1:2].mul_(3)
    part.t().mul_(0.9)
    part.t()[:64, 32:96].add_(0.03)
    torch._foreach_mul_([*part.split(32)], [1.1, 0.9, 1.2, 0.8])
    for chunk in part.chunk(2):
        chunk.copy_(chunk * 0.75)
    part[64:].zero_().add_(part[:64], alpha=0.5)
    part.add_(part.detach())
    part.lerp_(torch.ones_like(part), 0.1)
    torch.mul(part, 0.6, out=part)


def _every_alias(rank: int) -> None:
    for text in ("fp8", "mxfp8", "nvfp4(block=16x16)", "identity(dtype=float32)", "hybrid(row=fp8, col=mxfp8)"):
        quantizer = lpq.quantizer(text)
        values = [torch.randn(128, 256, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        for group in (None, dist.group.WORLD):
            weights = [nn.Parameter(quantizer.quantize(v, amax_group=group)) for v in values]
            ordinary = [nn.Parameter(w.dequantize()) for w in weights]
            kept = {id(p): p.detach()[64:] for p in (*weights, *ordinary)}
            for params in (weights, ordinary):
                optimizer = Does(params, lambda p, kept=kept: _through_aliases(p, kept[id(p)]))
                with collectives() as seen:
                    optimizer.step()
                spans = group is not None and text not in ("mxfp8", "identity(dtype=float32)")
                assert len(seen) == int(spans and params is weights), text
            for w, o in zip(weights, ordinary, strict=True):
                assert same(parts(w.detach()), parts(quantizer.quantize(o.detach()))), text


def _reads(rank: int) -> None:
    """Whoever reads values, on one rank or all, gets what was written so far; nothing is encoded for that."""
    net = sharded(converted(W8.format("nvfp4(block=16x16)")))
    names = {id(p): name for name, p in net.named_parameters()}

    def update(p: Tensor) -> None:
        part = local(p)
        if not isinstance(part, QuantizedTensor):
            return
        before = part.dequantize(torch.float32)
        held = {name: value.clone() for name, value in _buffers(part).items()}
        p.mul_(0.9).add_(0.003)
        value = before * 0.9 + 0.003
        with collectives() as seen:
            if rank == 0:
                found = [
                    part.dequantize(), part.clone(), p.detach().to_local() * 1, part[:32].clone(),
                    part.t().clone().t(), part.view(-1).clone().view(part.shape), torch.cat([part[:64], part[64:]]),
                    torch.zeros(part.shape).copy_(part), part.to(torch.float64).float(), part.data.abs() * part.sign(),
                ]  # fmt: skip
                for one in found:
                    assert type(one) is Tensor
                    assert torch.equal(one, value[: one.shape[0]])
                assert "QuantizedTensor" in repr(part)
                assert torch.empty_like(part).shape == part.shape
                with pytest.raises(RuntimeError, match=rf"^{names[id(p)]}: .* is a shard that the step of"):
                    assert part.row
                with pytest.raises(RuntimeError, match="it has operands again when the step has ended"):
                    torch.save(part, io.BytesIO())
        assert not seen
        assert torch.equal(p.full_tensor()[128 * rank :][:128], value)  # a collective by itself
        assert same(held, _buffers(part))
        found_by_all[id(p)] = value

    found_by_all: dict[int, Tensor] = {}
    with collectives() as seen:
        Does(net.parameters(), update).step()
    assert [c.kind for c in seen].count("all_reduce") == 1
    assert len(found_by_all) == 4
    for p in stored_weights(net):
        shard = found_by_all[id(p)]
        wholes = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(wholes, shard)
        whole = lpq.quantizer("nvfp4(block=16x16)").quantize(torch.cat(wholes), col=False)
        assert same(parts(local(p.detach())), parts(whole[128 * rank :][:128]))


def _buffers(part: QuantizedTensor) -> dict[str, Tensor]:
    return {f"{d}.{n}": b.view(torch.uint8) for d, s in part.sides for n, b in s.buffers().items() if b.dim()}


def _operands_of_an_unsharded_weight(rank: int) -> None:
    """They are encoded when they are asked for."""
    quantizer = lpq.quantizer("fp8")
    seen: list[Tensor] = []

    def update(p: Tensor) -> None:
        p.mul_(100)
        assert isinstance(p, QuantizedTensor)
        for other in (copy.deepcopy(p), torch.load(_saved(p), weights_only=True)):
            assert same(parts(other.detach()), parts(p.detach()))
        assert p.row is not None
        seen.append(p.row.scale.clone())
        p.mul_(2)

    weight = nn.Parameter(quantizer.quantize(torch.randn(64, 64)))
    before = weight.dequantize().detach()
    Does([weight], update).step()
    assert torch.equal(seen[0], quantizer.quantize(100 * before).row.scale)
    assert same(parts(weight.detach()), parts(quantizer.quantize(2 * quantizer.quantize(100 * before).dequantize())))


def _saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


# ---------------------------------------------------------------------------------- a forward inside a step


class Sharpness(SGD):
    """Climbs before it descends (SAM), so that its step calls a model which it has written to, and wraps SGD's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        params = [p for group in self.param_groups for p in group["params"]]
        climbed = [p.grad * 0.5 for p in params]
        for p, up in zip(params, climbed, strict=True):
            p.mul_(0.999)
            p.add_(up)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(params, climbed)
        super().step()
        torch._foreach_mul_(params, 0.99)  # as one that looks ahead does, after the step that it wraps
        return float(loss)


def _forward_inside_a_step(rank: int) -> None:
    """It computes with what was written so far, which is encoded for it: all weights with one more reduction."""
    SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # torch gives SGD's own step hooks when there is one
    runs = []
    for apart in (False, True):
        for shard in (False, True):
            net = converted("fp8-current")
            net = sharded(net) if shard else net
            optimizer = Sharpness(net.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for number in range(3):

                def closure(net: nn.Module = net, optimizer: Optimizer = optimizer, number: int = number) -> float:
                    optimizer.zero_grad()
                    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(number))
                    loss = (net(x) - x.roll(1, 0)).square().mean()
                    loss.backward()
                    return float(loss)

                before = closure()
                with collectives() as seen:
                    if apart:
                        losses.append(Sharpness.step.__wrapped__(optimizer, closure))  # type: ignore[attr-defined]
                    else:
                        losses.append(optimizer.step(closure))
                assert losses[-1] != before
                if shard and not apart:
                    assert [c.kind for c in seen].count("all_reduce") == 2
            runs.append((losses, bytes_of(net)))
            if not shard:
                twin = net
        assert runs[-1][0] == runs[-2][0]
        same_parts(net, twin, apart)
    assert runs[0][0] != runs[2][0], "the negative control: each write apart"


def _searching_a_line(rank: int) -> None:
    """LBFGS writes once before each closure, and puts clones back: as if each write encoded."""
    found = []
    for apart in (False, True):
        net = converted("fp8-current", blocks=1)
        optimizer = LBFGS(net.parameters(), lr=30, max_iter=4, line_search_fn="strong_wolfe")
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))

        def closure(net: nn.Module = net, optimizer: Optimizer = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - x.roll(1, 0)).square().mean()
            loss.backward()
            return loss

        take: Callable[..., Any] = LBFGS.step.__wrapped__ if apart else LBFGS.step  # type: ignore[attr-defined]
        found.append([float(take(optimizer, closure)) for _ in range(4)])
    assert found[0] == found[1]
    assert found[0][-1] < 0.5 * found[0][0]


def _saved_by_a_hook(rank: int, folder: str) -> None:
    """The optimizer's own hooks run inside its step: a checkpoint that one saves has what the step makes."""
    for shard in (True, False):
        net = sharded(converted("fp8-current")) if shard else converted("fp8-current")
        optimizer, path = WRITERS["loop"](net.parameters()), Path(folder) / str(shard)
        handle = optimizer.register_step_post_hook(lambda o, *_: lpq.checkpoint.save(path, net, step=1))  # noqa: B023
        give_gradients(net, 0)
        before = bytes_of(net)
        optimizer.step()
        handle.remove()
        assert not equal(bytes_of(net), before)
        other = sharded(converted("fp8-current")) if shard else converted("fp8-current")
        lpq.checkpoint.load(path, other)
        assert equal(bytes_of(other), bytes_of(net))


def _moved(rank: int) -> None:
    """FSDP2 moves shards to the accelerator before a gather, if they are offloaded: what moves is encoded first."""
    weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.ones(32, 32), amax_group=dist.group.WORLD))
    found: list[Tensor] = []

    def update(p: Tensor) -> None:
        p.mul_(3)
        with collectives() as seen:
            found.append(p.to("meta"))
        assert [c.kind for c in seen] == ["all_reduce"]
        with collectives() as seen:
            p.mul_(2)
        assert not seen

    Does([weight], update).step()
    assert type(found[0]) is QuantizedTensor
    assert torch.equal(weight.dequantize(), torch.full((32, 32), 6.0))


# ---------------------------------------------------------------------------------- a step that raises


class Mishap(Exception):
    """An error in a step."""


def _fail(*_: Any) -> None:
    raise Mishap


def _raises(rank: int) -> None:
    """The stored weights are what they were, whoever looks first and how, also while the error is being handled."""
    for recipe in ("fp8-current", "mxfp8"):
        for shard in (True, False):
            for look in (_values, bytes_of, _forward, _doubled, _stepped):
                found = []
                for unlucky in (True, False):
                    net = sharded(converted(recipe)) if shard else converted(recipe)
                    _forward(net)
                    last = stored_weights(net)[-1]
                    optimizer = Does(stored_weights(net), lambda p, last=last: _fail() if p.mul_(3) is last else None)
                    before = bytes_of(net)
                    try:
                        if unlucky:
                            optimizer.step()
                    except Mishap:
                        found.append(look(net))
                    else:
                        assert not unlucky
                        found.append(look(net))
                    assert look in (_doubled, _stepped) or equal(bytes_of(net), before)
                assert repr(found[0]) == repr(found[1]), (recipe, shard, look)


def _values(net: nn.Module) -> list[float]:
    return [float(local(p).dequantize().abs().sum()) for p in stored_weights(net)]


def _forward(net: nn.Module) -> float:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    return float(net(x).square().mean().detach())


def _doubled(net: nn.Module) -> list[float]:
    with torch.no_grad():
        for p in stored_weights(net):
            p.mul_(2)
    return _values(net)


def _stepped(net: nn.Module) -> list[float]:
    optimizer = WRITERS["loop"](net.parameters())
    give_gradients(net, 0)
    optimizer.step()
    return _values(net)


def _raises_in_a_wrapped_step(rank: int) -> None:
    """The one around it goes on, and writes."""
    weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.ones(32, 32)))
    inner = Does([weight], _fail)

    def update(p: Tensor) -> None:
        p.mul_(3)
        with pytest.raises(Mishap):
            inner.step()
        p.mul_(2)

    Does([weight], update).step()
    assert torch.equal(weight.dequantize(), torch.full((32, 32), 6.0))


def _in_another_thread(rank: int) -> None:
    """A step may have threads that write."""
    weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.randn(32, 32)))
    before = weight.dequantize().detach()

    def update(p: Tensor) -> None:
        for _ in range(3):
            thread = threading.Thread(target=lambda: p.data.add_(0.03))
            thread.start()
            thread.join()

    Does([weight], update).step()
    expected = lpq.quantizer("fp8").quantize(before.add(0.03).add(0.03).add(0.03))
    assert same(parts(weight.detach()), parts(expected))


def _compiled(rank: int) -> None:
    """Compiled code writes to the buffers at each operation: drafts are encoded before it, and begun anew after it."""
    traced = torch.compile(lambda weight: weight.add_(0.5), backend="aot_eager")
    quantizer = lpq.quantizer("fp8")

    def update(p: Tensor) -> None:
        p.mul_(1.07)
        p.mul_(1.01)
        traced(p.detach())
        p.mul_(0.93)
        p.mul_(0.99)

    weight = nn.Parameter(quantizer.quantize(torch.randn(64, 64)))
    value = weight.dequantize().detach()
    Does([weight], update).step()
    for function in (lambda v: v.mul(1.07).mul(1.01), lambda v: v.add(0.5), lambda v: v.mul(0.93).mul(0.99)):
        value = quantizer.quantize(function(value)).dequantize()
    assert torch.equal(weight.dequantize(), value)

    net, twin = converted("fp8-current"), converted("fp8-current")
    make = WRITERS["foreach"]
    optimizer, its = make(net.parameters()), make(twin.parameters())
    whole = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(2):
        for one in (net, twin):
            give_gradients(one, number)
        whole()
        its.step()
        for o in (optimizer, its):
            o.zero_grad()
        for a, b in zip(stored_weights(net), stored_weights(twin), strict=True):
            assert a.draft.step is None
            error = (a.dequantize() - b.dequantize()).norm() / b.dequantize().norm()
            assert error < 0.1  # it rounds at each write
    assert not equal(bytes_of(net), bytes_of(converted("fp8-current")))


@pytest.mark.parametrize(
    "check",
    [
        _every_alias,
        _reads,
        _operands_of_an_unsharded_weight,
        _moved,
        _forward_inside_a_step,
        _searching_a_line,
        _raises,
        _raises_in_a_wrapped_step,
        _in_another_thread,
        _compiled,
    ],
)
def test_two_ranks(check: Callable[[int], None]) -> None:
    spawn(check, 2)


def test_what_a_hook_saves(tmp_path: Path) -> None:
    spawn(_saved_by_a_hook, 2, str(tmp_path))
