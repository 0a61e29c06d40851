"""The experts of a mixture, which a model holds in stacks: to an engine they are layers, whose names count them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from lpq.engines.entries import Entry, Memories, Multiplied, Pieces, Stored
from lpq.nn.expert_names import Names, stacks_of
from lpq.nn.remembering import Remembering
from lpq.recipes import Recipe
from lpq.registry.showing import listed
from lpq.torch_private.tensors import local_part


class Stack(NamedTuple):
    """The matrices of all experts, one behind the other."""

    names: Names
    recipe: Recipe
    memories: Memories
    """Those of all experts."""


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacks of a model that engines have as layers, by the names of their parameters."""
    found = {}
    for stack in stacks_of(model):
        recipe: Any = getattr(stack.holder, "recipe", None)
        if stack.patterns is not None and is_quantized(recipe):
            assert isinstance(stack.holder, Remembering)
            found[stack.weight] = Stack(stack.names, recipe, states_of(stack.holder, stack.key))
    return found


def is_quantized(recipe: Recipe | None) -> bool:
    """Whether the weights of a stack with that recipe are layers to engines."""
    return recipe is not None and not recipe.w.side("row").plain


def states_of(module: Remembering, stack: str = "") -> dict[str, dict[str, Tensor]]:
    """The states of the quantizers of a module, or of a stack in it, which are the same on all ranks."""
    return {t: {key: local_part(value) for key, value in state.items()} for t, state in module.states(stack).items()}


def left_stacks(model: nn.Module) -> dict[str, bool]:
    """The modules with experts that stay in one tensor, in high precision, and whether they have a recipe."""
    found = {name.rpartition(".")[0] for name in stacks(model)}
    every = {stack.holder_name: getattr(stack.holder, "recipe", None) is not None for stack in stacks_of(model)}
    return {name: trained for name, trained in every.items() if name not in found}


def are_fused(stacks: Iterable[str]) -> bool:
    """Whether some of these stacks, by the names of their parameters, are of Hugging Face's models."""
    return any(name.rpartition(".")[2] != "weight" for name in stacks)


def notes_of(left: Mapping[str, bool]) -> Iterable[str]:
    """The remark for the user about experts that are trained quantized, and stay in high precision."""
    if stay := [name for name, trained in left.items() if trained]:
        yield (
            f"the experts of {listed(stay)} are in high precision, in one tensor: engines have no layers for experts "
            "that are transposed, interleaved or with biases"
        )


def split(
    stack: Stack, shape: Sequence[int], like: Entry, gather: Callable[[], Pieces], stored: Stored | None,
    imported: Mapping[str, Tensor],
) -> Iterator[Entry]:  # fmt: skip
    """The tensors of a stack ``[experts, rows, columns]`` for engines; ``imported``: the amaxes of inputs that layers
    came with."""
    _, rows, cols = shape
    held = _Held(gather)
    for number, layers in enumerate(stack.names):
        each = rows // len(layers)
        own = {tensor: {key: value[number] for key, value in kept.items()} for tensor, kept in stack.memories.items()}
        for i, layer in enumerate(layers):
            last = number == len(stack.names) - 1 and i == len(layers) - 1
            part = (i * each, (i + 1) * each, rows) if len(layers) > 1 else None
            yield replace(
                like, name=f"{layer}.weight", shape=(each, cols), gather=held.of(number, last),
                layer=Multiplied.by(stack.recipe, layer, own, imported.get(layer)), stored=stored, part=part,
            )  # fmt: skip


def split_rows(names: Names, like: Entry, gather: Callable[[], Pieces]) -> Iterator[Entry]:
    """The biases ``[experts, rows]`` for engines."""
    held = _Held(gather)
    for number, (layer,) in enumerate(names):
        get = held.of(number, number == len(names) - 1)
        yield replace(like, name=f"{layer}.bias", shape=like.shape[1:], gather=get)


class _Held:
    """A stack that is gathered for its first expert and forgotten with its last one."""

    def __init__(self, gather: Callable[[], Pieces]) -> None:
        self._gather = gather
        self._pieces: Mapping[str, Tensor] | None = None

    def of(self, number: int, last: bool) -> Callable[[], Pieces]:
        """Gathers an expert."""

        def get() -> Pieces:
            if self._pieces is None:
                self._pieces = self._gather()
            found = {name: piece[number] for name, piece in self._pieces.items()}
            if last:
                self._pieces = None
            return found

        return get
