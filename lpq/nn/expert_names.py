"""The names of experts in files, where each has layers of its own, by the stacks in which a model holds them.

A name has ``{}`` in the place of the expert's number: ``experts.{}.up_proj``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lpq.nn.experts import DOWN, UP, holds_experts, is_transposed, stacks
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.names import plain_name

Names = Sequence[tuple[str, ...]]
"""For each expert, the layers whose rows make its matrix, in order."""
NUMBER = "{}"
SMALL = (8, 8)
"""The shape of matrices that transformers may cut, or join to others."""


@dataclass(frozen=True)
class Stack:
    """A stack of a model, converted or not."""

    weight: str
    """The name of its parameter."""
    holder: nn.Module
    holder_name: str
    key: str
    """Its name in the holder; empty if that has but one."""
    count: int
    """The number of experts."""
    patterns: tuple[str, ...] | None
    """The names of the layers whose rows make the matrix of an expert; None: files have no layers for it."""

    @property
    def names(self) -> Names:
        """The names of the layers of each expert."""
        return numbered(self.patterns or (), self.count)

    @property
    def layers(self) -> list[str]:
        """The names of the layers of all experts."""
        return [layer for layers in self.names for layer in layers]


def numbered(patterns: Sequence[str], count: int) -> Names:
    """These names for each expert."""
    return [tuple(pattern.replace(NUMBER, str(i)) for pattern in patterns) for i in range(count)]


def counted(name: str) -> str:
    """The layers of a stack of this name: ``experts.{}.up_proj`` of ``experts.up_proj``; those of ``up_proj``, which no
    module holds together with others, are ``up_proj.{}``."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{NUMBER}.{leaf}" if parent else f"{name}.{NUMBER}".lstrip(".")


def stacks_of(model: nn.Module) -> Iterator[Stack]:
    """All stacks of a model."""
    for own, module in model.named_modules():
        name = plain_name(own)
        if isinstance(module, GroupedLinear):
            yield Stack(f"{name}.weight".lstrip("."), module, name, "", module.num_groups, (counted(name),))
        elif holds_experts(module):
            leaves = {} if _is_unlike(module) else _leaves(module)
            for key in stacks(module):
                path = f"{name}.{key}".lstrip(".")
                count = len(getattr(module, key))
                patterns = _in_files(model, path, count, leaves[key]) if key in leaves else None
                yield Stack(path, module, name, key, count, patterns)


def renamed(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names in files of those among these tensors, beside stacks of experts, that transformers calls otherwise
    there, such as a router's."""
    return names_in_files(model, names) if any(holds_experts(module) for module in model.modules()) else {}


def names_in_files(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names in files of those among these tensors that transformers calls otherwise there."""
    convert = _reverts(model)
    if convert is None:
        return {}
    numbers = {name: torch.full(SMALL, float(i)) for i, name in enumerate(names)}  # which show where each one went
    found: dict[str, list[str]] = {}
    for in_files, value in convert(model, numbers).items():
        for number in value.unique().tolist():
            found.setdefault(names[int(number)], []).append(in_files)
    return {name: own[0] for name, own in found.items() if own != [name] and len(own) == 1}


def _is_unlike(module: Any) -> bool:
    """Whether its matrices are transposed, interleaved or with biases: engines have no layers for these."""
    return is_transposed(module) or module.has_bias or (module.has_gate and not module.is_concatenated)


def _leaves(module: Any) -> dict[str, tuple[str, ...]]:
    """The parameters of fused experts, and the layers that engines have for each."""
    up = {UP[0]: ("gate_proj", "up_proj")} if module.has_gate else {UP[1]: ("up_proj",)}
    return {**up, DOWN: (DOWN,)}


def _in_files(model: nn.Module, key: str, count: int, leaves: Sequence[str]) -> tuple[str, ...] | None:
    """The names that transformers has for these layers in files, where the model is one of its; None if it has none.

    It converts numbers in place of the matrices, which show where each one went.
    """
    parent, _, _ = key.rpartition(".")
    convert = _reverts(model)
    if convert is None:
        return tuple(counted(f"{parent}.{leaf}".lstrip(".")) for leaf in leaves)
    numbers = torch.arange(count * len(leaves), dtype=torch.float32).view(count, len(leaves), 1)
    found = {int(t.flatten()[0]): name.removesuffix(".weight") for name, t in convert(model, {key: numbers}).items()}
    if sorted(found) != [*range(count * len(leaves))]:
        return None
    patterns = [_pattern([found[i * len(leaves) + j] for i in range(count)]) for j in range(len(leaves))]
    return None if None in patterns else tuple(pattern for pattern in patterns if pattern is not None)


def _pattern(names: Sequence[str]) -> str | None:
    """The name with the place of the number of which these are all."""
    parts = names[0].split(".")
    places = [i for i, part in enumerate(parts) if part == "0"]
    for place in reversed(places):
        pattern = ".".join([*parts[:place], NUMBER, *parts[place + 1 :]])
        if all(pattern.replace(NUMBER, str(i)) == name for i, name in enumerate(names)):
            return pattern
    return None


def _reverts(model: nn.Module) -> Any:
    """transformers' function that gives tensors the names that they have in files, for a model of its."""
    convert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    return convert if hasattr(model, "config") else None
