"""The plan of a layer for its tensors, and the buffers that hold what its quantizers remember across steps: all that
follows from its recipe alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lpq import registry
from lpq.formats.format import DIRECTIONS, Quantizer
from lpq.operations.derived_operands import made_at_use, rounds_stochastically
from lpq.operations.states import measures_fresh
from lpq.recipes import Recipe
from lpq.recipes.gemms import TENSORS

Pair = tuple[Quantizer, Quantizer]
"""The quantizers of the two operands of a product."""


class LayerBuffer(NamedTuple):
    """A buffer: its name, its tensor, and its key in the state of the tensor's quantizer."""

    name: str
    tensor: str
    key: str
    moves: bool
    """Whether a step changes it; else it is static."""
    stack: str = ""
    """The stack whose matrices have one each, in a module with several."""


def memories(recipe: Recipe) -> tuple[LayerBuffer, ...]:
    """The state buffers of a layer with this recipe."""
    quantizers = zip(TENSORS, (recipe.x, recipe.w, recipe.dy), strict=True)
    return tuple(
        LayerBuffer(f"{tensor}_{prefix}{buffer.name}", tensor, prefix + buffer.name, branch.moves)
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


@dataclass(frozen=True)
class Plan:
    """The decisions of a recipe on the three tensors of a layer and their products."""

    text: str
    """The text of the recipe, which a compiler takes for the plan."""
    x: Quantizer
    w: Quantizer
    dy: Quantizer
    fast: tuple[bool, bool, bool]
    """For fprop, dgrad and wgrad: whether a kernel may sum in less than fp32."""
    stochastic: bool
    """Whether anything is rounded with random bits."""
    draws_for_x: bool
    """Whether the input is."""
    turns: bool
    """Whether anything is rotated by signs that each pass draws."""
    dearer_fused: bool
    """Whether a kernel that computes the gradient of the output takes longer than what it spares, where that is
    multiplied in bf16: it computes all elements twice, as the whole matrix is measured first, and encodes what the
    layer by itself would make as a matrix in bf16."""
    memories: tuple[LayerBuffer, ...]
    """The buffers that hold the states of quantizers."""
    remembered: tuple[str, ...]
    """The tensors that have buffers."""
    moving: tuple[str, ...]
    """The tensors that have buffers which a step changes."""
    fresh: tuple[str, ...]
    """The tensors that are measured, and of which nothing is recalled, while their buffers are empty."""
    shares: bool
    """Whether all layers with the same static values encode an input alike, and encoding it is not free."""
    keeps_input: bool
    """Whether the input is kept for backward, which makes its column operand; ``keeps_weight`` likewise."""
    keeps_weight: bool
    w_at_use: bool
    """Whether a weight that is encoded already, as stored, held or gathered, has its row operand alone, of which each
    pass makes the column operand (``made_at_use``)."""
    fprop: Pair | None = None
    """The operands' quantizers, if one operand can be made without being encoded; dgrad and wgrad likewise."""
    dgrad: Pair | None = None
    wgrad: Pair | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """The plan of a recipe. Gradients are summed exactly unless the recipe allows less."""
        fast = (recipe.fprop.fast_accumulate, recipe.dgrad.fast_accumulate, recipe.wgrad.fast_accumulate)
        tensors = (recipe.x, recipe.w, recipe.dy)
        stochastic = any(map(rounds_stochastically, tensors))
        of = [product if any(map(_made_exactly, product)) else None for product in recipe.products.values()]
        fast_sums = (fast[0] is not False, fast[1] is True, fast[2] is True)
        states, row, col = memories(recipe), recipe.x.side("row"), recipe.x.side("col")
        draws = rounds_stochastically(recipe.x)
        dearer = any(of[1:]) and any(stat.of_all for side in DIRECTIONS for stat in recipe.dy.side(side).stats)
        own = draws or any(memory.tensor == "x" and memory.moves for memory in states)
        shares, keeps = not own and not (row.plain and col.plain), (recipe.save_x == "input", recipe.save_w == "weight")
        remembered = tuple(dict.fromkeys(memory.tensor for memory in states))
        moving = tuple(dict.fromkeys(memory.tensor for memory in states if memory.moves))
        bases = [tensor.side(direction).basis for tensor in tensors for direction in DIRECTIONS]
        turns = any(basis is not None and basis.drawn is not None for basis in bases)
        fresh = tuple(tensor for tensor in TENSORS if measures_fresh(getattr(recipe, tensor)))
        return cls(
            recipe.text, *tensors, fast_sums, stochastic, draws, turns, dearer, states, remembered, moving, fresh,
            shares, *keeps, made_at_use(recipe.w), *of,
        )  # fmt: skip

    def __post_init__(self) -> None:
        for quantizer in (self.x, self.w, self.dy):
            quantizer.ready()


def _made_exactly(side: Quantizer) -> bool:
    """Whether the format has kernels, for any hardware, that make an operand for a product without encoding it."""
    return bool(registry.kernels("exact_tile", (registry.format_of(type(side)).name,)))
