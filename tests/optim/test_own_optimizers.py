"""QuantizedStates around optimizers of others: they are known by what a copy of them does with small parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, AdamW, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import StepLR

from lpq.optim import QuantizedStates
from lpq.registry.errors import OptionError

SECOND = "fp8(scaling=block, pow2=false)"


def _decay(p: Tensor, rate: float) -> None:
    p.mul_(1 - rate)


class Lion(Optimizer):
    """An optimizer that keeps what its step needs in attributes."""

    def __init__(self, params: Any, kept: dict[str, Any] | None = None) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.decay, self.betas, self.dtype = _decay, {"now": 0.9, "later": [0.99]}, torch.float32
        self.steps: list[int] = []
        vars(self).update(kept or {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group["lr"], self.state[p])

    def one(self, p: Tensor, rate: float, state: Any) -> None:
        assert p.grad is not None
        m = state.setdefault("exp_avg", torch.zeros_like(p, dtype=self.dtype))
        self.decay(p, rate * 0.1)
        p.sub_(m.lerp(p.grad, 1 - self.betas["now"]).sign(), alpha=rate)
        m.lerp_(p.grad, 1 - self.betas["later"][0])
        self.steps.append(len(self.steps))


class LateSecond(Lion):
    """Its second moment is there after the first step, and gets a value in the second one."""

    def one(self, p: Tensor, rate: float, state: Any) -> None:
        assert p.grad is not None
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(p)
            return
        state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        p.addcdiv_(p.grad, state["exp_avg_sq"].sqrt() + 1e-8, value=-rate)


class Slower(Lion):
    """Its second moment falls more slowly the more steps it took, which it counts in a number."""

    def one(self, p: Tensor, rate: float, state: Any) -> None:
        assert p.grad is not None
        state["step"] = state.get("step", 0) + 1
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        v.lerp_(p.grad.square(), state["step"] ** -0.8)
        p.addcdiv_(p.grad, v.sqrt() + 1e-8, value=-rate)


class ByNorm(Lion):
    """Its step divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step()


class CountsItself(Lion):
    number = 0

    def step(self, closure: Any = None) -> Any:
        self.number += 1
        return super().step()

    def one(self, p: Tensor, rate: float, state: Any) -> None:
        super().one(p, rate / self.number, state)


class Ahead(Lion):
    """It has its step taken by another optimizer of the same parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = SGD(self.param_groups, lr=1.0, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


class Noisy(Lion):
    def one(self, p: Tensor, rate: float, state: Any) -> None:
        super().one(p, rate, state)
        p.add_(torch.randn_like(p))


def _param() -> nn.Parameter:
    p = nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    p.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    return p


def test_one_that_keeps_options_in_attributes_is_stepped() -> None:
    """It was refused: the copy that is tried lacked them."""
    ours, theirs = _param(), _param()
    inner, called = Lion([ours]), []
    hook = inner.register_step_pre_hook(lambda *_: called.append(1))
    optimizer, plain = QuantizedStates(inner, exp_avg="mxfp8"), Lion([theirs])
    hook.remove()
    assert not inner.steps
    assert not called
    for _ in range(3):
        optimizer.step()
        plain.step()
        assert torch.equal(ours, theirs)
        plain.state[theirs]["exp_avg"] = optimizer.state[ours]["exp_avg"].dequantize()
        ours.grad = theirs.grad = torch.randn_like(ours)


@pytest.mark.parametrize("make", [Ahead, lambda params: Lion(params, {"decay": SGD(params, lr=1.0).step})])
def test_what_could_step_the_parameters_themselves_is_not_in_the_copy(make: Callable[[Any], Optimizer]) -> None:
    p = _param()
    inner, before = make([p]), p.detach().clone()
    with pytest.raises(TypeError, match=r"raised AttributeError: .* no attribute '(base|decay)'"):
        QuantizedStates(inner, exp_avg="mxfp8")
    assert torch.equal(p, before)
    assert not inner.state


def test_the_step_that_a_scheduler_put_there_is_not_taken() -> None:
    p = _param()
    inner, before = AdamW([p]), p.detach().clone()
    StepLR(inner, 1)
    assert "step" in vars(inner)
    QuantizedStates(inner, exp_avg="mxfp8")
    assert torch.equal(p, before)
    assert not inner.state


@pytest.mark.parametrize(("name", "text"), [("square_avg", SECOND), ("grad_avg", "mxfp8")])
def test_a_variance_that_is_a_difference_of_states_is_refused(name: str, text: str) -> None:
    """Rounded states made it negative, and weights NaN."""
    inner = RMSprop([_param()], centered=True, momentum=0.9)
    with pytest.raises(OptionError, match=r"from which RMSprop computes a variance, .*use centered=False"):
        QuantizedStates(inner, **{name: text})
    QuantizedStates(inner, momentum_buffer="mxfp8").step()
    QuantizedStates(RMSprop([_param()]), square_avg=SECOND).step()


def test_the_copy_draws_no_numbers() -> None:
    before = torch.get_rng_state()
    assert QuantizedStates(Noisy([_param()]), exp_avg="mxfp8").forms.keys() == {"exp_avg"}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [ByNorm, CountsItself])
def test_one_whose_step_is_of_all_parameters_is_refused(kind: type[Lion]) -> None:
    """It stepped otherwise, without a word."""
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes other steps where parameters are stepped one by one"):
        QuantizedStates(kind([_param()]), exp_avg="mxfp8")


def test_a_second_moment_that_begins_late_is_one() -> None:
    """It was stored as it is, and elements that its format lost were divided by."""
    p = _param()
    optimizer = QuantizedStates(LateSecond([p]), exp_avg_sq=SECOND)
    for _ in range(2):
        optimizer.step()
    assert [*optimizer.state[p]] == ["exp_avg_sq_root"]
    again = copy.deepcopy(optimizer)
    assert again.forms["exp_avg_sq"].second


def test_steps_that_are_counted_in_a_number_are_late_ones_too() -> None:
    with pytest.raises(OptionError, match="in a step would never fall in it"):
        QuantizedStates(Slower([_param()]), exp_avg_sq="mxfp4")
    QuantizedStates(Slower([_param()]), exp_avg_sq=SECOND)


class Gains(Lion):
    """Each element has a gain, as in Rprop: a positive state that multiplies the update."""

    def one(self, p: Tensor, rate: float, state: Any) -> None:
        assert p.grad is not None
        gain = state.setdefault("gain", torch.ones_like(p))
        gain.mul_(torch.where(p.grad < 0, 0.5, 1.1))
        p.addcmul_(p.grad.sign(), gain, value=-rate)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Gains, "gain"),
        (lambda params: Rprop(params, lr=1e-3), "step_size"),
        (lambda params: Adadelta(params, lr=1.0), "acc_delta"),
    ],
)
@pytest.mark.parametrize("text", [SECOND, "nvfp4"])
def test_a_positive_state_that_multiplies_the_update_is_not_raised(
    make: Callable[[Any], Optimizer], name: str, text: str
) -> None:
    """It would make updates larger: beside a larger element of its block, by any factor. As a first moment it is at
    most twice as large."""
    p = nn.Parameter(torch.zeros(64, 128))
    optimizer = QuantizedStates(make([p]), **{name: text})
    assert not optimizer.forms[name].second
    p.grad = torch.ones_like(p)
    optimizer.step()
    shares = torch.logspace(0, -8, 128)
    state = optimizer.state[p].pop(name).dequantize() * 0 + shares
    saved = {**optimizer.state_dict()["state"][0], name: state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: saved}})
    held = optimizer.state[p][name].dequantize()
    assert bool((held <= 2 * shares).all())
    assert bool((held[:, :8] > 0).all())


def test_states_that_divide_are_second_moments_whatever_the_learning_rate() -> None:
    """Also where a schedule begins at 0, where a factor for all elements alike would change no update, and where weight
    decay moves a weight further than the update does, as by the whole learning rate of a schedule of factors."""
    p = nn.Parameter(torch.zeros(64, 128))
    for optimizer, name in (
        (AdamW([p], lr=0.0), "exp_avg_sq"),
        (AdamW([p], lr=1.0, weight_decay=0.1, betas=(0.98, 0.98)), "exp_avg_sq"),
        (RAdam([p]), "exp_avg_sq"),
        (Adafactor([p]), "col_var"),
        (Adadelta([p]), "square_avg"),
        (AdamW([p], amsgrad=True), "max_exp_avg_sq"),
        (LateSecond([p]), "exp_avg_sq"),
    ):
        assert QuantizedStates(optimizer, **{name: SECOND}).forms[name].second, name


def test_a_sum_of_all_steps_is_refused() -> None:
    """By the finest format an update was 15 times too large after 3,000 steps, and more after more. A maximum does not
    add up: it rises as soon as it is half a step of the format too small."""
    p = nn.Parameter(torch.zeros(64, 128))
    why = "cannot store sum of Adagrad in a format: it adds up all steps"
    if torch.__version__ < "2.12":  # it has its states before the first step, and small parameters have none
        why = "cannot find the states of Adagrad, whose step with a small matrix raised KeyError: 'sum'"
    for text in (SECOND, "mxfp8", "identity(dtype=bfloat16)"):
        with pytest.raises((OptionError, TypeError), match=why):
            QuantizedStates(Adagrad([p]), sum=text)
    kept = QuantizedStates(AdamW([p], amsgrad=True), max_exp_avg_sq=SECOND)
    for step in range(200):
        p.grad = torch.ones_like(p).index_fill(1, torch.tensor(0), 100.0 if step == 0 else 0.0)
        kept.step()
    exact = 1 - 0.999**200
    root = kept.state[p]["max_exp_avg_sq_root"].dequantize()[:, 1:]
    assert bool((root.square() > 0.87 * exact).all())


def test_groups_with_the_same_options_are_tried_once() -> None:
    """Some make a group of each parameter. Control: another option is another trial."""
    steps: list[int] = []

    class Counted(Lion):
        def one(self, p: Tensor, rate: float, state: Any) -> None:
            steps.append(1)
            super().one(p, rate, state)

    def tried(*rates: float) -> int:
        steps.clear()
        QuantizedStates(Counted([{"params": [_param()], "lr": rate} for rate in rates]), exp_avg="mxfp8")
        return len(steps)

    assert tried(1e-3) == tried(*[1e-3] * 20) > 0
    assert tried(1e-3, 1e-4) == 2 * tried(1e-3)
