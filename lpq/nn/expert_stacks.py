"""Stacks of experts, of grouped layers and of Hugging Face's modules, and the names that their experts have in files.

All that asks for the weights of experts one by one asks here: calibration, checkpoints, engines and reports. In files
each expert has layers of its own. A pattern has ``{}`` in the place of the expert's number: ``experts.{}.up_proj``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpq.nn.fused_experts import DOWN, UP, holds_experts, is_transposed, stacks
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.names import plain_name
from lpq.recipes import Recipe

Names = Sequence[tuple[str, ...]]
"""For each expert, the layers whose rows make its matrix, in order."""
NUMBER = "{}"
SMALL = (8, 8)
"""The shape of matrices that transformers may cut, or join to others."""


@dataclass(frozen=True)
class ExpertStack:
    """The matrices of all experts in one parameter of a module, which is converted or not."""

    holder: Any
    """The module: a ``GroupedLinear``, or experts of Hugging Face's, which hold several stacks."""
    holder_name: str
    key: str
    """Its name in a holder of several; empty if there is but one."""
    patterns: tuple[str, ...] | None
    """The names of the layers whose rows make the matrix of an expert; None: files have no layers for it."""

    @property
    def layer(self) -> str:
        """Its name as a layer, which multiplies by it."""
        return f"{self.holder_name}.{self.key}".strip(".")

    @property
    def name(self) -> str:
        """The name of its parameter."""
        return self.layer if self.key else f"{self.layer}.weight".lstrip(".")

    @property
    def weight(self) -> Tensor:
        """The parameter of the stack, or the tensor that a parametrization computes."""
        tensor: Tensor = getattr(self.holder, self.key or "weight")
        return tensor

    @property
    def is_transposed(self) -> bool:
        """Whether its matrices are ``[in, out]``."""
        return bool(self.key) and is_transposed(self.holder)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of its products; None: it has none, or is not converted."""
        return getattr(self.holder, "recipe", None)

    @property
    def names(self) -> Names:
        """The names of the layers of each expert."""
        return numbered(self.patterns or (), len(self.weight))

    @property
    def layers(self) -> list[str]:
        """The names of the layers of all experts."""
        return [layer for layers in self.names for layer in layers]


def numbered(patterns: Sequence[str], count: int) -> Names:
    """Return these names for each expert."""
    return [tuple(pattern.replace(NUMBER, str(i)) for pattern in patterns) for i in range(count)]


def counted(name: str) -> str:
    """Return the pattern for the layers of a stack: ``experts.{}.up_proj`` of ``experts.up_proj``. The layers of
    ``up_proj``, which no module holds together with others, are ``up_proj.{}``."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{NUMBER}.{leaf}" if parent else f"{name}.{NUMBER}".lstrip(".")


def expert_stacks(model: nn.Module) -> Iterator[ExpertStack]:
    """Yield all stacks of a model. To each expert it is one layer, with the number of the expert in its name."""
    for own, module in model.named_modules():
        keys = [""] if isinstance(module, GroupedLinear) else stacks(module) if holds_experts(module) else ()
        for key in keys:
            stack = ExpertStack(module, plain_name(own), key, ())
            yield replace(stack, patterns=(counted(stack.layer),))


def stacks_in_files(model: nn.Module) -> Iterator[ExpertStack]:
    """Yield all stacks of a model, each with the layers that files have for it."""
    for stack in expert_stacks(model):
        yield stack if not stack.key else replace(stack, patterns=_in_files(model, stack))


def renamed(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names in files of tensors beside stacks of experts, such as a router's, for which transformers uses other
    names in files."""
    return names_in_files(model, names) if any(holds_experts(module) for module in model.modules()) else {}


def names_in_files(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names in files of the tensors that have another name there, and are a tensor there."""
    convert = _reverts(model)
    if convert is None:
        return {}
    numbers = {name: torch.full(SMALL, i, dtype=torch.float64) for i, name in enumerate(names)}  # to see where they go
    by_name: dict[str, list[str]] = {}
    for in_files, value in convert(model, numbers).items():
        if len(of := value.unique().tolist()) == 1:  # else several are joined in files
            by_name.setdefault(names[int(of[0])], []).append(in_files)
    return {name: own[0] for name, own in by_name.items() if own != [name] and len(own) == 1}


def _in_files(model: nn.Module, stack: ExpertStack) -> tuple[str, ...] | None:
    """Return the patterns that transformers has for a stack in files, where the model is one of its; None if it has
    none. It converts numbers in place of the matrices, which show where each one went.
    """
    holder: Any = stack.holder
    if is_transposed(holder) or holder.has_bias or (holder.has_gate and not holder.is_concatenated):
        return None  # engines have no layers for transposed or interleaved matrices, nor for biases
    leaves = {UP[0]: ("gate_proj", "up_proj"), UP[1]: (UP[1],), DOWN: (DOWN,)}[stack.key]
    convert, count = _reverts(model), len(stack.weight)
    if convert is None:
        return tuple(counted(f"{stack.holder_name}.{leaf}".lstrip(".")) for leaf in leaves)
    numbers = torch.arange(count * len(leaves), dtype=torch.float32).view(count, len(leaves), 1)
    converted = convert(model, {stack.name: numbers})
    names = {int(t.flatten()[0]): name.removesuffix(".weight") for name, t in converted.items()}
    if sorted(names) != [*range(count * len(leaves))]:
        return None
    patterns = [_pattern([names[i * len(leaves) + j] for i in range(count)]) for j in range(len(leaves))]
    return None if None in patterns else tuple(pattern for pattern in patterns if pattern is not None)


def _pattern(names: Sequence[str]) -> str | None:
    """The pattern of these names, which differ by one number that counts them; None if there is no such number."""
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
