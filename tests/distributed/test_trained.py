"""Each weight of a model is trained, and once: where none or two parts of an optimizer have it, the step is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import spawn
from sharded import How, batch, built, model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lpq
from lpq.optim import MasterWeights

HOW = How("mxfp8", width=64, inner=128)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Objects from before are not searched for optimizers, which takes a while."""
    gc.freeze()
    yield
    gc.unfreeze()


def _backward(net: nn.Module) -> None:
    net(batch(0, HOW)).square().mean().backward()


def _split(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and everything else."""
    weights = [p for name, p in net.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    return weights, [p for p in net.parameters() if not any(p is w for w in weights)]


def _refused(optimizer: Optimizer, words: str) -> None:
    before = [p.grad for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert all(a is p.grad for a, p in zip(before, _params(optimizer), strict=True))


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _exchange(optimizer: Optimizer, *indices: int) -> None:
    """Put the first of its parameters in the place of others, as a library does that goes by addresses."""
    params = optimizer.param_groups[0]["params"]
    for index in indices:
        params[index] = params[2]


def _one_that_stands_in_it_several_times(net: nn.Module, wrap: Callable[[Optimizer], Optimizer]) -> None:
    optimizer = wrap(AdamW(net.parameters()))
    _backward(net)
    _exchange(optimizer, 3, 7)
    _refused(
        optimizer,
        r"has 0\.up\.weight 3 times, so that a step would write to it as often, and it has no 0\.down\.weight, "
        r"1\.up\.weight: make it of model\.parameters\(\) once the model is sharded\. If a library exchanged",
    )


def _one_that_stands_in_none(net: nn.Module, wrap: Callable[[Optimizer], Optimizer]) -> None:
    weights, rest = _split(net)
    optimizer = wrap(AdamW([*rest, *weights[:1]]))
    _backward(net)
    words = r"no optimizer has 0\.down\.weight, 1\.up\.weight, 1\.down\.weight, though this \w+ has other weights of"
    _refused(optimizer, words)
    _refused(optimizer, words)  # as long as it is so
    for weight in weights[1:]:
        weight.grad = None
    optimizer.step()
    later = wrap(AdamW(weights[1:]))
    _backward(net)
    optimizer.step()
    del later
    _backward(net)
    optimizer.step()  # it had stepped beside an optimizer of theirs


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


def _one_for_what_is_no_weight(net: nn.Module) -> Iterator[Optimizer]:
    """Something else, that is no optimizer, may train the weights."""
    yield AdamW(_split(net)[1])


def _several_models(net: nn.Module) -> Iterator[Optimizer]:
    """Of which another one has a weight twice that is not lpq's, with which torch goes on."""
    other, plain = model(64, 128), nn.Linear(4, 4)
    lpq.convert(other, "mxfp8", weights="high_precision")
    _backward(other)
    plain(torch.ones(2, 4)).sum().backward()
    yield AdamW([*net.parameters(), *plain.parameters(), *other.parameters()])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        yield SGD([*plain.parameters(), *plain.parameters()], lr=0.1)


def _one_for_each_weight(net: nn.Module) -> Iterator[Optimizer]:
    """Which steps as soon as its gradient is there, as in fused backward."""
    optimizers = [AdamW([p]) for p in net.parameters()]
    gradients = [p.grad for p in net.parameters()]
    for p in net.parameters():
        p.grad = None
    for one, gradient in zip(reversed(optimizers), reversed(gradients), strict=True):
        _params(one)[0].grad = gradient
        yield one
        one.zero_grad()


LEGITIMATE = [
    _frozen_weights, _unused_weights, _two_optimizers, _one_for_what_is_no_weight, _several_models, _one_for_each_weight
]  # fmt: skip


def _what_is_legitimate(make: Callable[[], nn.Module]) -> None:
    for case in LEGITIMATE:
        net = make()
        _backward(net)
        every: list[Optimizer] = []
        for optimizer in case(net):
            every.append(optimizer)
        for _ in range(2):
            for optimizer in every:
                optimizer.step()
            _backward(net)
            for weight in _split(net)[0] if case is _unused_weights else ():
                weight.grad = None


def _one_that_steps_later(net: nn.Module) -> None:
    """An optimizer that is there, and does not step each time."""
    weights, rest = _split(net)
    often, seldom = AdamW([*rest, *weights[:2]]), SGD(weights[2:], lr=0.1)
    for number in range(4):
        _backward(net)
        often.step()
        often.zero_grad()
        if number % 2:
            seldom.step()
            seldom.zero_grad()


def _exchanged_under_masters(make: Callable[[], nn.Module]) -> None:
    """Its masters are those of weights that are not the model's any more."""
    net, other = make(), make()
    optimizer = MasterWeights(AdamW(net.parameters()))
    optimizer.param_groups[0]["params"][:] = other.parameters()
    _backward(other)
    _refused(optimizer, r"^a \[64\] parameter took the place of another one after MasterWeights was made.*afterwards")


def _all(make: Callable[[str], nn.Module], legitimate: tuple[str, ...]) -> None:
    for weights in ("high_precision", "quantized"):
        wraps: list[Any] = [lambda optimizer: optimizer, *([MasterWeights] if weights == "quantized" else [])]
        for wrap in wraps:
            _one_that_stands_in_it_several_times(make(weights), wrap)
            if weights == "high_precision" or wrap is MasterWeights:
                _one_that_stands_in_none(make(weights), wrap)
        if weights in legitimate:
            _what_is_legitimate(lambda weights=weights: make(weights))  # type: ignore[misc]
            _one_that_steps_later(make(weights))
    _exchanged_under_masters(lambda: make("quantized"))


def _unsharded(weights: str) -> nn.Module:
    return lpq.convert(model(64, 128), "mxfp8", weights=weights)  # type: ignore[arg-type]


def test_in_one_process() -> None:
    _all(_unsharded, ("high_precision",))


def _two_ranks(rank: int) -> None:
    _all(lambda weights: built(How("mxfp8", weights=weights, width=64, inner=128, ranks=2)), ("high_precision",))


def test_two_ranks() -> None:
    spawn(_two_ranks, 2)


def test_twice_under_masters() -> None:
    weights = [*_unsharded("quantized").parameters()]
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = AdamW([*weights, weights[2]])
    with pytest.raises(ValueError, match=r"0\.up\.weight: a \[128, 64\] weight stands in the optimizer twice"):
        MasterWeights(optimizer)


def test_it_is_not_decided_where_optimizers_cannot_be_seen() -> None:
    """``gc.freeze()`` hides all that there is."""
    net = _unsharded("high_precision")
    weights, rest = _split(net)
    often, other = AdamW([*rest, *weights[:2]]), SGD(weights[2:], lr=0.1)
    before = [weight.detach().clone() for weight in weights]
    _backward(net)
    gc.freeze()
    often.step()
    other.step()
    assert not any(torch.equal(now, was) for now, was in zip(weights, before, strict=True)), "all have been stepped"
