"""The hooks of a module are listed where lpq looks for them, in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from lpq.torch_private import dispatch
from lpq.torch_private.hooks import (
    OWN,
    global_hooks,
    hang_again,
    has_hooks,
    hooks_before,
    hooks_behind,
    hooks_of,
    hooks_of_tensor,
    laid_out_by_own,
    may_see_input,
    noting_own,
    others_hang,
    own_hooks,
)

KINDS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize(
    ("hang", "listed"),
    [(nn.Module.register_forward_pre_hook, hooks_before), (nn.Module.register_forward_hook, hooks_behind)],
)
def test_hooks_are_listed(hang: Callable[..., Any], listed: Callable[[Any], dict[int, Any]]) -> None:
    module = nn.Linear(2, 2)
    assert not listed(module)
    handle = hang(module, lambda *args: None)
    assert len(listed(module)) == 1
    handle.remove()
    assert not listed(module)


def nothing(*args: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_a_module(kind: str) -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    register: Callable[..., Any] = getattr(module, f"register_{kind}")
    handle = register(nothing)
    assert has_hooks(module)
    assert [len(hooks) for hooks in hooks_of(module)].count(1) == 1
    handle.remove()
    assert not has_hooks(module)
    assert not any(hooks_of(module))


def test_own_hooks_are_no_others() -> None:
    module = nn.Linear(1, 1)

    def apply() -> nn.Module:
        module.register_forward_pre_hook(nothing)
        module.register_forward_hook(lambda _, given, y: y + given[0])
        return module

    assert noting_own(apply, module) is module
    copy = deepcopy(module)
    for one in (module, copy):
        assert len(own_hooks(one)) == 2
        assert vars(one)[OWN] == own_hooks(one)
        assert not has_hooks(one)
        assert not others_hang(one, hooks_before, hooks_behind)
        assert not may_see_input(one)
        assert laid_out_by_own(one, 3, 4) == 7
    handle = module.register_forward_hook(nothing)
    assert others_hang(module, hooks_behind)
    assert not others_hang(module, hooks_before)
    assert may_see_input(module)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)


def test_hooks_by_which_transformers_notes_results() -> None:
    capturing: Any = pytest.importorskip("transformers.utils.output_capturing", reason="needs transformers 5")
    module = nn.Linear(2, 2)
    capturing.install_output_capuring_hook(module, "attentions", 1)
    assert others_hang(module, hooks_behind)
    assert not may_see_input(module)
    module.register_forward_pre_hook(nothing)
    assert may_see_input(module)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_all_modules(kind: str) -> None:
    assert not global_hooks()
    register: Callable[..., Any] = getattr(nn.modules.module, f"register_module_{kind}")
    handle = register(nothing)
    try:
        assert global_hooks()
    finally:
        handle.remove()
    assert not global_hooks()


def test_a_trial_of_a_module_runs_without_modes() -> None:
    with dispatch.FakeTensorMode():
        with dispatch.without_modes():
            assert not dispatch.modes()
            assert type(torch.ones(2)) is torch.Tensor
        assert dispatch.modes()
        assert type(torch.ones(2)) is not torch.Tensor


def test_hooks_of_a_tensor() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert not any(hooks_of_tensor(tensor))
    tensor.register_hook(lambda _: None)
    assert [bool(hooks) for hooks in hooks_of_tensor(tensor)] == [True, False]
    tensor.register_post_accumulate_grad_hook(lambda _: None)
    assert all(hooks_of_tensor(tensor))


@pytest.mark.parametrize("again", [False, True])
def test_hooks_are_hung_again_on_what_was_swapped(again: bool) -> None:
    """torch lists the hooks of a tensor whose content it has exchanged, and calls none until they are hung again."""
    called: list[str] = []
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    weight.register_hook(lambda _: called.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda _: called.append("post"))
    torch.utils.swap_tensors(weight, other)
    assert all(hooks_of_tensor(weight))
    if again:
        hang_again(weight)
    weight.sum().backward()
    assert called == (["hook", "post"] if again else [])
