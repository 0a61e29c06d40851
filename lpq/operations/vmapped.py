"""Functions of a format for one matrix, run by ``torch.vmap`` over many of one size at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lpq.torch_private.dispatch import reaching_transforms

Function = Callable[..., Sequence[Tensor]]


class _Reinterpreted(torch.autograd.Function):
    """``x.view(dtype)``, which ``torch.vmap`` supports from torch 2.13 on."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """There is no backward."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return x.movedim(in_dims[0], 0).view(dtype), 0


class _Batchable(TorchFunctionMode):
    """A mode that replaces calls which ``torch.vmap`` cannot run, or would run matrix by matrix, by calls that it
    can."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("out"), Tensor):
            out = kwargs.pop("out")
            return out.copy_(func(*args, **kwargs))
        if func is Tensor.view and isinstance(args[-1], torch.dtype):
            return _Reinterpreted.apply(*args)  # type: ignore[no-untyped-call]
        if func in (Tensor.clamp_, torch.clamp_):
            return args[0].copy_(torch.clamp(*args, **kwargs))
        return func(*args, **kwargs)


def vmapped(function: Function, *stacks: Tensor) -> list[Tensor]:
    """Run ``function`` on each matrix of the stacks; return a stack of each of its results."""
    with _Batchable(), reaching_transforms():
        return list(torch.vmap(lambda *each: tuple(function(*each)))(*stacks))
