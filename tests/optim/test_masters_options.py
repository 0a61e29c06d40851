"""Options of parameter groups are one for MasterWeights and the optimizer it wraps, whoever sets them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights, QuantizedStates

pytestmark = pytest.mark.filterwarnings("error", "ignore:masters begin with")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), "fp8-current", weights="quantized")


def _train(model: nn.Module, optimizer: MasterWeights, scheduler: Any) -> list[float]:
    rates = []
    for number in range(4):
        torch.manual_seed(number)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
    return rates


def test_a_scheduler_may_be_given_either() -> None:
    found = []
    for of_inner in (False, True):
        model = _model()
        optimizer = MasterWeights(SGD(model.parameters(), lr=1.0))
        scheduler = StepLR(optimizer.optimizer if of_inner else optimizer, 1, gamma=0.5)
        rates = _train(model, optimizer, scheduler)
        # Not of the biases: torch's dequantize() returns an ordinary parameter itself, no leaf any more.
        found.append([p.dequantize() for p in model.parameters() if isinstance(p, QuantizedTensor)])
        if of_inner:
            assert rates == [0.5, 0.25, 0.125, 0.0625]
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.0625
    assert len(found[0]) == 2
    assert equal(*found)


def test_a_state_from_before_the_scheduler_loads_and_the_schedule_goes_on() -> None:
    model, early = _model(), _model()
    optimizer, other = (MasterWeights(AdamW(one.parameters(), lr=1.0)) for one in (model, early))
    _train(model, optimizer, scheduler := StepLR(optimizer, 1, gamma=0.5))
    before = other.state_dict()
    assert "initial_lr" in optimizer.param_groups[0]
    assert "initial_lr" not in before["param_groups"][0]
    optimizer.load_state_dict(before)
    assert _train(model, optimizer, scheduler) == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("way", ["state", "pickle", "deepcopy"])
def test_a_scheduler_of_the_wrapped_optimizer_goes_on_as_it_was(way: str) -> None:
    """A rate that the scheduler set after the last step was not saved, and one from before the next step was undone."""
    model = _model()
    optimizer = MasterWeights(AdamW(model.parameters(), lr=1.0))
    _train(model, optimizer, StepLR(optimizer.optimizer, 1, gamma=0.5))
    if way == "state":
        other = MasterWeights(AdamW(model.parameters(), lr=1.0))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else copy.deepcopy(optimizer)
    assert [group["lr"] for group in other.state_dict()["param_groups"]] == [2.0**-4]
    LambdaLR(other.optimizer, lambda step: 3.0)
    other.step()
    assert {group["lr"] for one in (other, other.optimizer) for group in one.param_groups} == {3.0}


class Counting(SGD):
    """An optimizer that keeps a number in its group, as some that need no schedule do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_the_wrapped_optimizer_keeps_in_its_groups_stays_and_is_saved() -> None:
    model = _model()
    optimizer = MasterWeights(Counting(model.parameters(), lr=0.1))
    _train(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    assert optimizer.optimizer.param_groups[0]["k"] == 4
    assert optimizer.state_dict()["param_groups"][0]["k"] == 4
    optimizer.param_groups[0]["k"] = 10
    optimizer.step()
    assert optimizer.param_groups[0]["k"] == 11


def test_an_option_may_be_a_tensor_of_several_numbers() -> None:
    model = _model()
    optimizer = MasterWeights(AdamW(model.parameters(), lr=0.1))
    for number in range(2):
        optimizer.param_groups[0]["scales"] = torch.full((3,), float(number))
        optimizer = pickle.loads(pickle.dumps(optimizer))
        optimizer.step()
        assert torch.equal(optimizer.optimizer.param_groups[0]["scales"], torch.full((3,), float(number)))


def test_groups_that_are_added_later_share_theirs_too() -> None:
    model = _model()
    optimizer = MasterWeights(AdamW(list(model[0].parameters()), lr=0.1))  # type: ignore[index]
    optimizer.step()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})  # type: ignore[index]
    optimizer.optimizer.param_groups[1]["lr"] = 0.3
    optimizer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.3]


def test_an_optimizer_that_has_state_before_its_first_step() -> None:
    """Adagrad, whose sums start at a value; they go to the masters."""
    quantizer, value = lpq.quantizer("fp8"), torch.randn(32, 48)
    weight = nn.Parameter(quantizer.quantize(value))
    twin = nn.Parameter(weight.dequantize())
    ours = MasterWeights(Adagrad([weight], lr=0.1, initial_accumulator_value=0.5))
    theirs = Adagrad([twin], lr=0.1, initial_accumulator_value=0.5)
    for seed in range(3):
        weight.grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(seed))
        twin.grad = weight.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(ours.masters[weight], twin.detach())
        assert torch.equal(weight.dequantize(), quantizer.quantize(twin.detach()).dequantize())
    with pytest.raises(ValueError, match="has not taken a step yet"):
        MasterWeights(theirs)


def test_an_optimizer_of_no_stored_weight_is_told() -> None:
    layer = lpq.convert(nn.Sequential(nn.Linear(32, 48)), "fp8-current")
    with pytest.warns(UserWarning, match=r"none of the optimizer's weights is stored quantized.*weights='quantized'"):
        MasterWeights(AdamW(layer.parameters()))


class ByClosure(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_what_cannot_be_wrapped_is_refused_in_words() -> None:
    weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.randn(32, 48)))
    with pytest.raises(TypeError, match=r"got a generator: make one first"):
        MasterWeights(p for p in [weight])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"MasterWeights cannot wrap LBFGS: it needs a closure in each step.*Use it alone, over weights"
    ):
        MasterWeights(LBFGS([weight]))
    with pytest.raises(TypeError, match=r"MasterWeights cannot wrap ByClosure: it needs a closure in each step"):
        MasterWeights(ByClosure([weight]))
    with pytest.raises(TypeError, match=r"is wrapped already, use it as it is"):
        MasterWeights(MasterWeights(AdamW([weight])))


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_an_optimizer_of_weights_that_were_replaced_is_refused(weights: Any) -> None:
    """Its steps would train nothing."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = AdamW(model.parameters())
    lpq.convert(model, "mxfp8", weights=weights)
    with pytest.raises(RuntimeError, match=r"AdamW has a \[64, 64\] parameter that lpq.convert replaced"):
        optimizer.step()
    AdamW(model.parameters()).step()
    other = nn.Linear(64, 64)
    SGD(other.parameters(), lr=0.1).step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_goes_on_as_the_original_does(pickled: bool, fused: bool) -> None:
    model = _model()
    optimizer = MasterWeights(AdamW(model.parameters(), lr=0.05, fused=fused))
    scheduler = StepLR(optimizer, 2, 0.5)
    _train(model, optimizer, scheduler)
    both = (model, optimizer)
    twin, other = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
    assert {id(w) for w in other.masters} == {id(p) for p in twin.parameters() if p.dim() == 2}
    assert _train(twin, other, StepLR(other, 2, 0.5)) == _train(model, optimizer, StepLR(optimizer, 2, 0.5))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if isinstance(stored := p.detach(), QuantizedTensor):
            assert torch.equal(stored.dequantize(), q.detach().dequantize())
        else:
            assert torch.equal(p, q)
    for m, n in zip(optimizer.masters.values(), other.masters.values(), strict=True):
        assert torch.equal(m, n)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data[:32].zero_(),
        lambda p: p.data.t().fill_(2),
        lambda p: torch._foreach_zero_([p.data]),
        lambda p: p.data.copy_(torch.ones(p.shape)),
    ],
)
def test_what_is_written_through_data_is_not_undone_in_silence(write: Callable[[Any], object]) -> None:
    """Autograd does not count it; averages and clipping of weights are written so."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), "mxfp8", weights="quantized")
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.0))

    def step() -> None:
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()

    step()
    write(model[0].weight)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"^0\.weight: a \[64, 64\] weight was written to since its master was made"):
        step()
    optimizer.take(model[0].weight)  # type: ignore[index]
    step()


@pytest.mark.parametrize(
    "move", [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to(torch.float32), lambda m: m.share_memory()]
)
def test_moving_nothing_is_no_write(move: Callable[[nn.Module], object]) -> None:
    model = _model()
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1))
    before = model[0].weight.dequantize()  # type: ignore[operator, union-attr]
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        move(model)
    assert not torch.equal(model[0].weight.dequantize(), before), "it has trained"  # type: ignore[operator, union-attr]


def test_a_write_to_a_buffer_is_seen() -> None:
    model = _model()
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1))
    model[0].weight.row.data.zero_()  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"or seen\(weight\) where it is again what it was"):
        optimizer.step()
    optimizer.seen(model[0].weight)  # type: ignore[index]
    optimizer.step()


def test_a_copy_knows_that_a_weight_was_written_to() -> None:
    model = _model()
    optimizer = MasterWeights(SGD(model.parameters(), 0.1))
    with torch.no_grad():
        model[0].weight.fill_(2)
    twin, other = copy.deepcopy((model, optimizer))
    twin(torch.randn(8, 64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^0\.weight: a \[.*\] weight was written to since its master was made"):
        other.step()


def test_inference_mode_is_refused_in_words() -> None:
    """It ended in words of torch, at a later step."""
    model = _model()
    ways: tuple[Callable[[Any], Any], ...] = (MasterWeights, lambda inner: QuantizedStates(inner, exp_avg="mxfp8"))
    for wrap in ways:
        optimizer = wrap(AdamW(model.parameters()))
        for refused in (lambda wrap=wrap: wrap(AdamW(model.parameters())), optimizer.step):
            with (
                torch.inference_mode(),
                pytest.raises(RuntimeError, match=r"(Master|Quanti).* outside; torch\.no_grad"),
            ):
                refused()
