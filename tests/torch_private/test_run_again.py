"""Hooks and compilers tell what checkpointing runs again, and keep what they are to keep, in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lpq.operations.operators import opaque_when_traced
from lpq.torch_private import autograd, compiling

SIN = torch.ops.aten.sin.default


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_kept_is_not_made_again(again: bool, kept: bool) -> None:
    seen, graphs = [], []

    @opaque_when_traced
    def sin(x: Tensor) -> Tensor:
        seen.append(compiling.is_run_again())
        return compiling.saved_if_run_again(SIN, x) if kept else SIN(x)

    def part(x: Tensor) -> Tensor:
        return sin(x).exp()

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return y

    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    torch.compile(run, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.sin().exp() * x.cos()).detach())
    assert (True in seen) is again
    assert [graph.count(SIN) for graph in graphs] == [1, int(again and not kept)]


def test_nothing_is_run_again_where_nothing_compiles() -> None:
    assert not compiling.is_run_again()
    assert torch.equal(compiling.saved_if_run_again(SIN, torch.ones(3)), torch.ones(3).sin())


def test_hooks_of_saved_tensors_are_seen_and_which_recompute() -> None:
    found: list[bool] = []

    def run(x: Tensor) -> Tensor:
        found.append(autograd.recomputes(autograd.hooks_that_save()))
        return x.sin()

    assert autograd.hooks_that_save() is None
    x = torch.ones(2, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    with save_on_cpu():
        run(x)
    assert found == [False, True, False]
