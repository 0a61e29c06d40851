"""The hooks of a module are listed where lpq looks for them, in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lpq.torch_private.hooks import hooks_before, hooks_behind


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
