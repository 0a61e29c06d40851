"""A step of which tensors are shared out: it has the same parts when it is bound anew, and its phases come in order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.nn.multiply import LayerCall, Multiplication
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step, bind_few, step_of
from lpq.nn.traced_step import through_dispatcher

ROWS, FEATURES, OUTPUTS = 32, 64, 96
multiply: Any = Multiplication.apply
order: list[str] = []


class Doubled(NamedTuple):
    """Each gradient of the input is twice what it would be, as if another rank had the same."""

    factor: float

    def named(self, *, sized: bool) -> tuple[Any, ...]:
        return f"{__name__}:Doubled", self.factor

    def step(self, plan: Plan, shapes: Shapes, encoder: Any, product: Any) -> Step:
        step = step_of(plan, shapes._replace(parts=None), encoder, product)
        x, dy, encode_dy, w = step.x, step.dy, step.dy.encode, step.w
        assert x is not None
        assert w is not None

        def noting(what: str, function: Any) -> Any:
            if function is None or torch.compiler.is_compiling():
                return function
            return lambda *args: (order.append(what), function(*args))[1]

        def same(kept: Any) -> Any:
            return kept

        def exchange(tensors: Any, seeds: Any) -> Any:
            return [[] for _ in tensors], seeds

        return step._replace(
            exchange=noting("exchange", exchange), x=x._replace(
                encode=noting("x", x.encode), begin=noting("begin", same), later=noting("x.col", x.later or same)
            ), w=w._replace(encode=noting("w", w.encode)), fprop=noting("fprop", step.fprop),
            dy=dy._replace(encode=noting("dy", encode_dy), later=noting("dy.col", same)),
            dgrad=noting("dgrad", step.dgrad), wgrad=noting("wgrad", step.wgrad),
            finish_dx=noting("finish dx", lambda dx: dx * self.factor),
        )  # fmt: skip


def gradients(parts: Doubled | None, mode: str) -> tuple[Tensor, ...]:
    plan = Plan.of(lpq.recipe("x=mxfp8, w=mxfp8, dy=mxfp8"))
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(OUTPUTS, FEATURES, requires_grad=True)
    dtypes = (torch.float32,) * 4
    shapes = Shapes(ROWS, FEATURES, OUTPUTS, *dtypes, x.device, True, True, False, parts=parts)

    def function(x: Tensor, w: Tensor) -> Tensor:
        step = None if mode == "compiled" else bind_few(plan, shapes)
        y: Tensor = multiply(x, w, None, LayerCall(plan, shapes, step))
        return y

    run = torch.compile(function, fullgraph=True, backend="aot_eager") if mode == "compiled" else function
    y = run(x, w)
    dy = torch.randn(ROWS, OUTPUTS)
    with FlopCounterMode(display=False) if mode == "watched" else nullcontext():
        if mode == "in parts":
            return *torch.autograd.grad(y, x, dy, retain_graph=True), *torch.autograd.grad(y, w, dy)
        return torch.autograd.grad(y, (x, w), dy)


FORWARD = ["exchange", "x", "w", "fprop"]
BACKWARD = ["begin", "dy", "dgrad", "dy.col", "x.col", "wgrad", "finish dx"]


@pytest.mark.parametrize("mode", ["plain", "watched", "in parts", "compiled"])
def test_a_step_that_is_bound_anew_has_the_same_parts(mode: str) -> None:
    expected = gradients(None, "plain")
    order.clear()
    dx, dw = gradients(Doubled(2.0), mode)
    assert torch.equal(dx, 2 * expected[0])
    assert torch.equal(dw, expected[1])
    if mode == "in parts":
        assert order == [*FORWARD, "dy", "dgrad", "finish dx", "begin", "dy", "dy.col", "x.col", "wgrad"]
    elif mode != "compiled":
        assert order == FORWARD + BACKWARD


def test_a_step_without_its_parts_would_be_noticed() -> None:
    shapes = Shapes(ROWS, FEATURES, OUTPUTS, *(torch.float32,) * 4, torch.device("cpu"), True, True, False)
    plan = Plan.of(lpq.recipe("x=mxfp8, w=mxfp8, dy=mxfp8"))
    for parts in (None, Doubled(2.0)):
        own = shapes._replace(parts=parts)
        for step in (bind_few(plan, own), through_dispatcher(plan, own)):
            assert (step.finish_dx is None) is (parts is None)
