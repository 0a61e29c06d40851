"""A body is called without its operator only where nobody looks on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from lpq import operations
from lpq.operations.operators import can_call_directly

X = torch.randn(32, 48)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_ordinary_tensor_without_gradient_is_alone() -> None:
    with torch.no_grad():
        assert can_call_directly(X)
        assert can_call_directly(torch.nn.Parameter(X))


@pytest.mark.parametrize(
    "mode",
    [Watching, torch.enable_grad, lambda: torch.autocast("cpu"), FakeTensorMode],
    ids=["mode", "gradient", "autocast", "fake"],
)
def test_it_is_not_where_somebody_looks_on(mode: Callable[[], Any]) -> None:
    with torch.no_grad():
        for inside in (nullcontext(), mode()):
            with inside:
                assert can_call_directly(X) == isinstance(inside, nullcontext)


def test_it_is_not_without_values() -> None:
    with torch.no_grad():
        assert not can_call_directly(X.to("meta"))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize, torch.func.grad], ids=lambda f: f.__name__)
def test_it_is_not_under_a_transform(transform: Callable[..., Any]) -> None:
    """A transform hands over a tensor that looks ordinary, and has no memory."""
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found.append(can_call_directly(x))
        return x.sum()

    transform(look)(X)
    assert found == [False]


def test_a_mode_sees_the_operators() -> None:
    quantizer = lpq.quantizer("mxfp8")
    with torch.no_grad(), Watching() as mode:
        operations.quantize(X, None, quantizer, quantizer)
    assert mode.seen == ["lpq.quantize.default"]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_tracer_sees_the_operators(pre_dispatch: bool) -> None:
    quantizer = lpq.quantizer("mxfp8")

    def run(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return operations.quantize(x, None, quantizer, quantizer)[0].tensors()  # type: ignore[union-attr]

    graph = make_fx(run, pre_dispatch=pre_dispatch)(X)
    assert "lpq.quantize" in {str(node.target).removesuffix(".default") for node in graph.graph.nodes}
