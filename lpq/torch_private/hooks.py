"""Hooks that others hang on modules: all but the hooks of lpq's styles, which lay out tensors over ranks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch

M = TypeVar("M")
OWN = "lpq_style_hooks"
"""An attribute of modules: the keys of the hooks that lpq's styles of tensor parallelism hung on them."""

_CAPTURES = "transformers.utils.output_capturing"
"""The Python module of hooks that note what a module returns. transformers leaves them on attention, layers and routers
for good, once a pass was asked for hidden states, attentions or a router's logits. They note the input of the first
layer, and no other input."""

Hooks = Callable[[Any], dict[int, Any]]
hooks_before: Hooks = attrgetter("_forward_pre_hooks")
"""The hooks that are called before a module, with what it is given; lpq's own, too."""
hooks_behind: Hooks = attrgetter("_forward_hooks")
"""The hooks that are called behind a module, with what it is given and what it returns; lpq's own, too."""
hooks_of: Callable[[Any], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks that a call of a module, or a gradient that goes through it, calls; lpq's own, too."""
hooks_of_tensor: Callable[[Any], tuple[Any, ...]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks that autograd calls with the gradient of a tensor."""


def hang_again(tensor: Any) -> None:
    """Have autograd call the hooks of a tensor whose content ``swap_tensors`` has exchanged, and its hooks not."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks_of_tensor(tensor)


def others_hang(module: Any, *kinds: Hooks) -> bool:
    """Whether others have hung hooks of these kinds on a module."""
    return any(not kind(module).keys() <= own_hooks(module) for kind in kinds)


def may_see_input(module: Any) -> bool:
    """Whether hooks that others hung on a module may look at what it is given."""
    own, behind = own_hooks(module), hooks_behind(module)
    looks = any(key not in own and getattr(hook, "__module__", "") != _CAPTURES for key, hook in behind.items())
    return looks or others_hang(module, hooks_before)


def has_hooks(module: Any) -> bool:
    """Whether a call of the module, or a gradient that goes through it, calls hooks that others hung on it."""
    return any(not hooks.keys() <= own_hooks(module) for hooks in hooks_of(module))


def own_hooks(module: Any) -> frozenset[int]:
    """The keys of the hooks that lpq's styles hung on a module."""
    keys: frozenset[int] = vars(module).get(OWN, frozenset())
    return keys


def noting_own(apply: Callable[[], M], module: Any) -> M:
    """Call ``apply``, and note the hooks that it hangs on a module as lpq's own."""
    before = {key for hooks in hooks_of(module) for key in hooks}
    result = apply()
    vars(module)[OWN] = own_hooks(module) | {key for hooks in hooks_of(module) for key in hooks} - before
    return result


def laid_out_by_own(module: Any, x: Any, y: Any) -> Any:
    """Lay out a result as the hooks of lpq's styles do behind a module, which was not called itself."""
    for hook in hooks_behind(module).values():
        y = hook(module, (x,), y)
    return y


global_hooks: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
"""Whether a hook is called with every module."""
