"""Experts that lie in stacks: each is calibrated as a layer of its own, by its number among all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.checkpoint.model import Model
from lpq.checkpoint.tensors import chunk
from lpq.distributed.shard import plain
from lpq.nn.expert_names import counted, numbered
from lpq.nn.experts import Experts, is_transposed, stacks
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.names import plain_name
from lpq.torch_private.tensors import local_part

Holder = GroupedLinear | Experts
"""A module with stacks: it has one recipe."""
ONLY = ""
"""The name of the stack of a module that has but one."""


class Stack(NamedTuple):
    """The matrices of all experts of a layer."""

    holder: Holder
    key: str
    """Its name in that; ``ONLY`` if there is but one."""
    names: Sequence[str]
    """The names of the layers that engines have for it, one for each expert."""
    weight: str
    """The name of its parameter."""


def stacks_in(model: nn.Module) -> Iterator[Stack]:
    """The stacks of a converted model, of modules with a recipe."""
    for own, module in Model(model).module.named_modules():
        name = plain_name(own)
        if isinstance(module, GroupedLinear) and module.recipe is not None:
            yield Stack(module, ONLY, _names(name, module.num_groups), f"{name}.weight".lstrip("."))
        elif isinstance(module, Experts) and module.recipe is not None:
            for key, weight in stacks(module).items():
                path = f"{name}.{key}".lstrip(".")
                yield Stack(module, key, _names(path, len(weight)), path)


def _names(stack: str, count: int) -> list[str]:
    return [layer for (layer,) in numbered((counted(stack),), count)]


def is_shared_out(holder: nn.Module) -> bool:
    """Whether ranks share its experts out, so that each gets the rows of all ranks for its own."""
    return isinstance(holder, Holder) and holder.dispatched is not None


def matrix_of(weight: Tensor, holder: nn.Module, expert: int) -> Tensor | None:
    """The matrix of an expert, ``[out, in]``; None if this rank does not hold it."""
    first, last, _ = chunk(weight)[0].indices(len(weight))
    if not first <= expert < last:
        return None
    found = plain(local_part(weight.detach()))[expert - first]
    return found.t() if isinstance(holder, Experts) and is_transposed(holder) else found


@contextmanager
def sending_nothing(model: nn.Module) -> Iterator[None]:
    """Send, inside, none of this rank's rows to any expert of modules whose experts ranks share out."""

    def without(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, ends = args
        return rows, torch.zeros_like(ends) if isinstance(ends, Tensor) else [0 for _ in ends]

    with ExitStack() as stack:
        for module in model.modules():
            if getattr(module, "shares_out_experts", False):
                stack.callback(module.register_forward_pre_hook(without, prepend=True).remove)
            elif isinstance(module, Experts) and module.dispatched is not None:
                module.sends_rows = False
                stack.callback(module.__dict__.pop, "sends_rows")
        yield
