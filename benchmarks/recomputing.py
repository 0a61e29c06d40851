"""Activation checkpointing of a block by PyTorch's wrapper: of all of it, or of what is cheap to compute again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lpq  # which defines the operators of its products

NONE, SELECTIVE, FULL = WAYS = ("none", "selective", "full")
assert lpq
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default, torch.ops.lpq.gemm.default})
"""The products of each contender. Every second one is computed again."""
SAVED = frozenset({
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.max.default,
})  # fmt: skip
"""Operators that never run again: attention, and ``max``, by which torchao finds amaxes."""


def wrapped(block: nn.Module, way: str) -> nn.Module:
    """The block, which ``way`` lets run again in backward. Wrap it before it is compiled or sharded."""
    if way == NONE:
        return block
    how: dict[str, Any] = {"context_fn": _contexts} if way == SELECTIVE else {}
    found: nn.Module = checkpoint_wrapper(block, preserve_rng_state=False, **how)
    return found


def _contexts() -> Any:
    """One for forward and one for when it runs again, of one pass."""
    return create_selective_checkpoint_contexts(partial(_policy, Counter()))  # type: ignore[no-untyped-call]


def _policy(products: Counter[bool], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torchtitan's choice by operators: attention and every second product are saved."""
    saved = operator in SAVED
    if operator in PRODUCTS:
        products[context.is_recompute] += 1
        saved = products[context.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
