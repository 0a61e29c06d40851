"""A step of an optimizer that has a weight of a model several times is refused, and no other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from ranks import on_ranks
from sharded import SMALL, How, batch, built, model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lpq
from lpq.distributed.model_gathers import Gathering
from lpq.optim import MasterWeights

HOW = How("mxfp8", ranks=2, **SMALL)
Wrap = Callable[[Any], Any]


def _backward(net: nn.Module) -> None:
    net(batch(0, HOW)).square().mean().backward()


def _split(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and everything else."""
    weights = [p for name, p in net.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    return weights, [p for p in net.parameters() if not any(p is w for w in weights)]


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refused(optimizer: Optimizer, words: str) -> None:
    before = [p.grad for p in _params(optimizer)]
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert all(a is p.grad for a, p in zip(before, _params(optimizer), strict=True))


def _exchange(optimizer: Optimizer, *indices: int) -> None:
    """Put the first of its parameters in the place of others, as a library does that goes by addresses."""
    params = optimizer.param_groups[0]["params"]
    for index in indices:
        params[index] = params[2]


def _one_that_stands_in_it_several_times(net: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(AdamW(net.parameters()))
    _backward(net)
    _exchange(optimizer, 3, 7)
    _refused(
        optimizer,
        r"has 0\.up\.weight 3 times, so that a step would write to it as often, and it has no 0\.down\.weight, "
        r"1\.up\.weight: make it of model\.parameters\(\) once the model is sharded\. If a library exchanged",
    )


def _frozen_weights(net: nn.Module) -> Iterator[Optimizer]:
    weights, rest = _split(net)
    for weight in weights[1:]:
        weight.requires_grad_(False)
    yield AdamW([*rest, *weights[:1]])


def _unused_weights(net: nn.Module) -> Iterator[Optimizer]:
    weights, rest = _split(net)
    yield AdamW([*rest, *weights[:1]])
    for weight in weights[1:]:
        weight.grad = None


def _two_optimizers(net: nn.Module) -> Iterator[Optimizer]:
    weights, rest = _split(net)
    yield from (SGD(weights[:3], lr=0.1), AdamW([*weights[3:], *rest]))


def _one_for_some_weights(net: nn.Module) -> Iterator[Optimizer]:
    """The others get gradients that nobody steps, as where a part of a model is tuned."""
    weights, rest = _split(net)
    yield AdamW([*rest, *weights[:1]])


def _one_for_what_is_no_weight(net: nn.Module) -> Iterator[Optimizer]:
    """Something else, that is no optimizer, may train the weights."""
    yield AdamW(_split(net)[1])


def _several_models(net: nn.Module) -> Iterator[Optimizer]:
    """Of which another one has a weight twice that is not lpq's, with which torch goes on."""
    other, plain = lpq.convert(model(64, 128), "mxfp8", weights="high_precision"), nn.Linear(4, 4)
    _backward(other)
    plain(torch.ones(2, 4)).sum().backward()
    yield AdamW([*net.parameters(), *plain.parameters(), *other.parameters()])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        yield SGD([*plain.parameters(), *plain.parameters()], lr=0.1)


def _one_for_each_weight(net: nn.Module) -> Iterator[Optimizer]:
    """Which steps as soon as its gradient is there, as in fused backward."""
    optimizers, gradients = [AdamW([p]) for p in net.parameters()], [p.grad for p in net.parameters()]
    net.zero_grad()
    for one, gradient in zip(reversed(optimizers), reversed(gradients), strict=True):
        _params(one)[0].grad = gradient
        yield one
        one.zero_grad()


LEGITIMATE = [
    _frozen_weights, _unused_weights, _two_optimizers, _one_for_some_weights, _one_for_what_is_no_weight,
    _several_models, _one_for_each_weight,
]  # fmt: skip


def _what_is_legitimate(make: Callable[[], nn.Module]) -> None:
    for case in LEGITIMATE:
        net = make()
        _backward(net)
        every: list[Optimizer] = []
        for optimizer in case(net):
            every.append(optimizer)
        for number in range(2):
            if number:
                _backward(net)
            for weight in _split(net)[0] if number and case is _unused_weights else ():
                weight.grad = None
            for optimizer in every:
                optimizer.step()


def _exchanged_under_masters(net: nn.Module, other: nn.Module) -> None:
    """Its masters are those of weights that are not the model's any more."""
    optimizer = MasterWeights(AdamW(net.parameters()))
    optimizer.param_groups[0]["params"][:] = other.parameters()
    _backward(other)
    _refused(optimizer, r"^a \[64\] parameter took the place of another one after MasterWeights was made.*afterwards")


def _all(make: Callable[[str], nn.Module]) -> None:
    plain: Wrap = lambda optimizer: optimizer  # noqa: E731
    for weights, wrap in (("high_precision", plain), ("quantized", plain), ("quantized", MasterWeights)):
        _one_that_stands_in_it_several_times(make(weights), wrap)
    _what_is_legitimate(lambda: make("high_precision"))
    _exchanged_under_masters(make("quantized"), make("quantized"))


def _unsharded(weights: Any) -> Any:
    return lpq.convert(model(64, 128), "mxfp8", weights=weights)


def test_in_one_process() -> None:
    _all(_unsharded)


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    _all(lambda weights: built(How("mxfp8", weights, ranks=2, **SMALL)))


def test_twice_under_masters() -> None:
    weights = [*_unsharded("quantized").parameters()]
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = AdamW([*weights, weights[2]])
    with pytest.raises(ValueError, match=r"0\.up\.weight: a \[128, 64\] weight stands in the optimizer twice"):
        MasterWeights(optimizer)


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_copy_that_a_thread_is_making_concerns_no_other_optimizer(weights: str) -> None:
    """A model is deep-copied half-way while the optimizer of another one steps for the first time."""
    net = _unsharded(weights)
    copied, stepped = Event(), Event()

    class Waits(nn.Module):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            copied.set()
            assert stepped.wait(60)
            return Waits()

    copies: list[nn.Module] = []
    net.add_module("waits", Waits())  # the last one: the layers before it have their copies by then
    thread = Thread(target=lambda: copies.append(copy.deepcopy(net)))
    thread.start()
    try:
        assert copied.wait(60)
        other = _unsharded(weights)
        wrap: Any = MasterWeights if weights == "quantized" else lambda optimizer: optimizer
        optimizer = wrap(AdamW(other.parameters()))
        _backward(other)
        optimizer.step()
    finally:
        stepped.set()
        thread.join()
    twice = AdamW(copies[0].parameters())
    _exchange(twice, 3)
    _refused(twice, r"has 0\.up\.weight 2 times")  # the copy is watched as the model is


def test_an_optimizer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has nothing of lpq costs what does not depend on how many models lpq has converted."""
    nets = [_unsharded(weights) for weights in ("high_precision", "quantized") for _ in range(3)]
    asked: list[Any] = []
    concerns = Gathering.concerns

    def counted(self: Any, params: Any) -> bool:
        asked.append(self)
        return concerns(self, params)

    monkeypatch.setattr(Gathering, "concerns", counted)
    optimizer = SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert [sum(one is net[0].up.model.fsdp for one in asked) for net in nets] == [1] * len(nets)
    later = _unsharded("high_precision")
    optimizer.step()  # which asks the new one alone
    optimizer.add_param_group({"params": [*later.parameters()]})
    asked.clear()
    optimizer.step()
    optimizer.step()
    assert sum(one is later[0].up.model.fsdp for one in asked) == 1
    params = optimizer.param_groups[1]["params"]
    params.append(params[2])
    _refused(optimizer, r"has 0\.up\.weight 2 times")
