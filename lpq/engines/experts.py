"""The experts of a mixture, which a model holds in stacks: to an engine they are layers, whose names count them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.engines.entries import Entry, Multiplied, Pieces, Stored
from lpq.nn.experts import DOWN, UP, holds_experts, is_dense
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.names import plain_name
from lpq.nn.remembering import Remembering
from lpq.recipes import Recipe
from lpq.torch_private.tensors import local_part

Names = Sequence[tuple[str, ...]]
"""For each expert, the layers whose rows make its matrix, in order."""
Memories = Mapping[str, Mapping[str, Tensor]]
"""The statistics that quantizers of ``x`` and of ``w`` remember, by the names of their buffers, of all experts."""
FUSED_EXPERTS = (*UP, DOWN)
"""The parameters of experts of Hugging Face's models."""


class Stack(NamedTuple):
    """The matrices of all experts, one behind the other."""

    names: Names
    recipe: Recipe
    memories: Memories


def counted(name: str, count: int) -> list[tuple[str, ...]]:
    """The layers of a stack of this name: ``experts.up_proj`` has ``experts.0.up_proj``, and so on; ``up_proj``, which
    no module holds together with others, ``up_proj.0``."""
    parent, _, leaf = name.rpartition(".")
    return [(f"{parent}.{i}.{leaf}" if parent else f"{name}.{i}".lstrip("."),) for i in range(count)]


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacks of a model that engines have as layers, by the names of their parameters."""
    found = {}
    for weight, (module, _, key, names) in every_stack(model).items():
        recipe: Any = getattr(module, "recipe", None)
        if recipe is None or recipe.w.side("row").plain:
            continue
        found[weight] = Stack(names, recipe, states_of(module, key.rstrip("_")))
    return found


def every_stack(model: nn.Module) -> dict[str, tuple[Any, str, str, Names]]:
    """The stacks of a model, converted or not, that engines have as layers, by the names of their parameters.

    Each comes with the module that holds it, the module's name, the prefix of its statistics there, and the layers.
    """
    found: dict[str, tuple[Any, str, str, Names]] = {}
    for own, module in model.named_modules():
        name = plain_name(own)
        if isinstance(module, GroupedLinear):
            found[f"{name}.weight".lstrip(".")] = module, name, "", counted(name, module.num_groups)
        elif holds_experts(module) and not _is_unlike(module):
            for key, leaves in _halves(module).items():
                path = f"{name}.{key}".lstrip(".")
                if (names := _stored_names(model, path, _count(module), leaves)) is not None:
                    found[path] = module, name, f"{key}_", names
    return found


def states_of(module: Remembering, stack: str = "") -> dict[str, dict[str, Tensor]]:
    """The states of the quantizers of a module, or of a stack in it, which are the same on all ranks."""
    return {t: {key: local_part(value) for key, value in state.items()} for t, state in module.states(stack).items()}


def left_stacks(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """The modules with experts that stay in one tensor, in high precision, and whether they have a recipe."""
    found = {name.rpartition(".")[0] for name in stacks(model)}
    for own, module in model.named_modules():
        if (isinstance(module, GroupedLinear) or holds_experts(module)) and plain_name(own) not in found:
            yield plain_name(own), getattr(module, "recipe", None) is not None


def _is_unlike(module: Any) -> bool:
    """Whether its matrices are transposed, interleaved or with biases: engines have no layers for these."""
    return (
        is_dense(module)
        or module.is_transposed
        or module.has_bias
        or not (module.is_concatenated or not module.has_gate)
    )


def _stored_names(model: Any, key: str, count: int, leaves: Sequence[str]) -> Names | None:
    """The names that transformers has for these layers in files, where the model is one of its; None if it has none.

    It converts numbers in place of the matrices, which show where each one went.
    """
    parent, _, _ = key.rpartition(".")
    convert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if convert is None or not hasattr(model, "config"):
        return [tuple(f"{parent}.{i}.{leaf}".lstrip(".") for leaf in leaves) for i in range(count)]
    numbers = torch.arange(count * len(leaves), dtype=torch.float32).view(count, len(leaves), 1)
    found = {int(t.flatten()[0]): name.removesuffix(".weight") for name, t in convert(model, {key: numbers}).items()}
    if sorted(found) != [*range(count * len(leaves))]:
        return None
    return [tuple(found[i * len(leaves) + j] for j in range(len(leaves))) for i in range(count)]


def file_names(model: Any) -> Callable[[str], str]:
    """The name in files of a tensor in high precision beside stacks of experts, such as a router's: transformers may
    have another one there than in memory, as for experts."""
    convert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    fused = any(holds_experts(module) for module in model.modules())
    if convert is None or not hasattr(model, "config") or not fused:
        return lambda name: name

    def file_name(name: str) -> str:
        found = [*convert(model, {name: torch.zeros(1)})]
        return str(found[0]) if len(found) == 1 else name

    return file_name


def split(
    names: Names, shape: Sequence[int], like: Entry, gather: Callable[[], Pieces],
    used: Callable[[str], Multiplied], stored: Stored | None, memories: Memories,
) -> Iterator[Entry]:  # fmt: skip
    """The tensors of a stack ``[experts, rows, columns]`` for engines; ``used``: how a layer multiplies."""
    _, rows, cols = shape
    held = _Held(gather)
    for number, layers in enumerate(names):
        each = rows // len(layers)
        own = {tensor: {key: value[number] for key, value in kept.items()} for tensor, kept in memories.items()}
        for i, layer in enumerate(layers):
            last = number == len(names) - 1 and i == len(layers) - 1
            part = (i * each, (i + 1) * each, rows) if len(layers) > 1 else None
            yield replace(
                like, name=f"{layer}.weight", shape=(each, cols), gather=held.of(number, last),
                layer=replace(used(layer), memories=own), stored=stored, part=part,
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


def _count(module: Any) -> int:
    return int(module.num_experts)


def _halves(module: Any) -> dict[str, tuple[str, ...]]:
    """The parameters of fused experts, and the layers that engines have for each."""
    up = {UP[0]: ("gate_proj", "up_proj")} if module.has_gate else {UP[1]: ("up_proj",)}
    return {**up, DOWN: (DOWN,)}
