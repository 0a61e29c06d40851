"""Runs of a layer that activation checkpointing runs again in backward, while states of the layer may move.

A run that is recomputed must read the states that it read first. They move in backward: of two runs, the backward of
one moves them before the other is recomputed. Autograd counts the writes to a tensor, so the counts identify a state.
Checkpointing recomputes the tensors that a run saves: a run saves the counts among them, and backward compares them
with the counts of the first run. The older way, ``use_reentrant=True``, runs forward without saving anything, and is
refused, under hooks of others as well, such as those that keep saved tensors elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lpq.nn.weighted_layer import WeightedLayer
from lpq.operations.states import State
from lpq.torch_private import autograd
from lpq.torch_private.dispatch import without_modes
from lpq.torch_private.tensors import version_of


def check(layer: WeightedLayer) -> None:
    """Refuse to run forward again in backward if checkpointing is reentrant."""
    if torch.compiler.is_compiling() or autograd.graph_task() == -1:
        return
    hooks = autograd.hooks_that_save()
    if hooks is not None and (autograd.recomputes(hooks) or not autograd.runs_node("CheckpointFunctionBackward")):
        return
    raise RuntimeError(
        f"{layer.title}: activation checkpointing with use_reentrant=True runs it again in backward, where the "
        "state that delayed scaling had when it ran first is lost: pass use_reentrant=False, or give it a recipe that "
        "remembers nothing"
    )


def counts_to_save(states: Mapping[str, State]) -> Tensor | None:
    """The write counts of the states that a run reads, to be saved among its tensors; None if it is not recomputed."""
    if torch.compiler.is_compiling() or autograd.hooks_that_save() is None:
        return None
    with without_modes():  # one that selects what is recomputed would hand out the first run's counts again
        return torch.tensor(_counts(states), device="cpu")


def compare(title: str, before: list[int], saved: Tensor) -> None:
    """Refuse backward of a run whose saved tensors were recomputed from other states than the run had read."""
    if saved.tolist() != before:
        raise RuntimeError(
            f"{title}: activation checkpointing runs it again in backward, and its states of delayed scaling have "
            "moved since it ran: it would compute other numbers. That happens where a layer runs several times before "
            "backward, or a whole backward runs twice. Leave it out of checkpointing, or give it a recipe that "
            "remembers nothing"
        )


def _counts(states: Mapping[str, State]) -> list[int]:
    """The write count of each state that forward reads."""
    memories = [memory for tensor in ("x", "w") if tensor in states for memory in states[tensor].values()]
    return [0 if memory.is_inference() else version_of(memory) for memory in memories]
