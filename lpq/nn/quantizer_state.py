"""The statistics that a layer's quantizers remember across steps: buffers of the layer, in its state dict."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from lpq.recipes.gemms import TENSORS

if TYPE_CHECKING:
    from lpq.recipes import Recipe


class Memory(NamedTuple):
    """A buffer: its name, its tensor, and its key in the state of that tensor's quantizer."""

    name: str
    tensor: str
    key: str
    moves: bool
    """Whether a step changes it; else it is static."""
    stack: str = ""
    """The stack whose matrices have one each, in a module with several."""


def memories(recipe: Recipe) -> tuple[Memory, ...]:
    """The state buffers of a layer with this recipe."""
    quantizers = zip(TENSORS, (recipe.x, recipe.w, recipe.dy), strict=True)
    return tuple(
        Memory(f"{tensor}_{prefix}{buffer.name}", tensor, prefix + buffer.name, branch.moves)
        for tensor, quantizer in quantizers
        for prefix, branch in quantizer.state_branches().items()
        for buffer in branch.state
    )


def check_names(layer: nn.Module, recipe: Recipe, own: Collection[str], title: str) -> None:
    """Refuse a recipe if one of its buffers has the name of an attribute of the layer that is not among ``own``."""
    for name, *_ in memories(recipe):
        if name not in own and hasattr(layer, name):
            raise ValueError(
                f"{title}: {recipe.title} remembers {name}, and the layer has an attribute of that name: rename it"
            )
