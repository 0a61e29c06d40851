"""The experts of a mixture, which a model holds in stacks: to an engine they are layers, whose names count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from lpq.engines.entries import FileEntry, Memories, Multiplied, Pieces, is_quantized
from lpq.nn.expert_stacks import Names, stacks_in_files
from lpq.nn.stateful_layer import StatefulLayer
from lpq.recipes import Recipe
from lpq.torch_private.tensors import local_part


class Stack(NamedTuple):
    """A stack of a model or of a checkpoint."""

    names: Names
    """The layers of each expert; none if files have no layers for it."""
    recipe: Recipe | None
    memories: Memories
    """The statistics of all experts."""

    @property
    def is_split(self) -> bool:
        """Whether its experts are layers to engines, and it does not stay in one tensor, in high precision."""
        return any(self.names) and is_quantized(self.recipe)


Stacks = Mapping[str, Stack]
"""All stacks, by the names of their parameters."""


def stacks(model: nn.Module) -> Stacks:
    """Return the stacks of a model."""
    return {
        stack.name: Stack(stack.names, stack.recipe, states_of(stack.holder, stack.key) if stack.recipe else {})
        for stack in stacks_in_files(model)
    }


def states_of(module: StatefulLayer, stack: str = "") -> dict[str, dict[str, Tensor]]:
    """Return the states of the quantizers of a module, or of a stack in it, which are the same on all ranks."""
    return {t: {key: local_part(value) for key, value in state.items()} for t, state in module.states(stack).items()}


def left_modules(stacks: Stacks) -> dict[str, bool]:
    """Return the modules whose experts stay in one tensor, in high precision, and whether they have a recipe."""
    split = {_module(name) for name, stack in stacks.items() if stack.is_split}
    return {_module(name): stack.recipe is not None for name, stack in stacks.items() if _module(name) not in split}


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def split(entry: FileEntry, stacks: Stacks, imported: Mapping[str, Tensor]) -> list[FileEntry] | None:
    """Return the tensors for engines of a stack or of its biases; None if the entry is neither.

    ``imported``: the amaxes of inputs that layers came with.
    """
    stack = stacks.get(entry.name)
    if stack is not None and stack.is_split:
        return [*_matrices(stack, entry, imported)]
    stack = stacks.get(f"{entry.name.removesuffix('bias')}weight") if entry.name.endswith("bias") else None
    if stack is not None and stack.is_split and len(entry.shape) == 2:
        rows, last = _GatheredStack(entry.gather), len(stack.names) - 1
        return [
            replace(entry, name=f"{layer}.bias", shape=entry.shape[1:], gather=partial(rows.of, number, number == last))
            for number, (layer,) in enumerate(stack.names)
        ]
    return None


def _matrices(stack: Stack, whole: FileEntry, imported: Mapping[str, Tensor]) -> Iterator[FileEntry]:
    """Yield the matrices of a stack ``[experts, rows, columns]``."""
    assert stack.recipe is not None
    _, rows, cols = whole.shape
    stack_pieces = _GatheredStack(whole.gather)
    for number, layers in enumerate(stack.names):
        each = rows // len(layers)
        own = {t: {key: value[number] for key, value in values.items()} for t, values in stack.memories.items()}
        for i, layer in enumerate(layers):
            last = number == len(stack.names) - 1 and i == len(layers) - 1
            part = (i * each, (i + 1) * each, rows) if len(layers) > 1 else None
            yield replace(
                whole, name=f"{layer}.weight", shape=(each, cols), gather=partial(stack_pieces.of, number, last),
                layer=Multiplied.by(stack.recipe, layer, own, imported.get(layer)), part=part,
            )  # fmt: skip


class _GatheredStack:
    """A stack that is gathered for its first expert and forgotten with its last one."""

    def __init__(self, gather: Callable[[], Pieces]) -> None:
        self._gather = gather
        self._pieces: Mapping[str, Tensor] | None = None

    def of(self, number: int, last: bool) -> Pieces:
        """Return the pieces of an expert, which is the ``last`` one or not."""
        if self._pieces is None:
            self._pieces = self._gather()
        pieces = {name: piece[number] for name, piece in self._pieces.items()}
        if last:
            self._pieces = None
        return pieces
