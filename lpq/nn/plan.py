"""The plan of a layer for its tensors: all that follows from its recipe alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.nn.quantizer_state import Memory, memories
from lpq.operations.derived_operands import rounds_stochastically

if TYPE_CHECKING:
    from lpq.recipes import Recipe

Pair = tuple[Quantizer, Quantizer]
"""The quantizers of the two operands of a product."""


@dataclass(frozen=True)
class Plan:
    """The decisions of a recipe on the three tensors of a layer and their products."""

    x: Quantizer
    w: Quantizer
    dy: Quantizer
    fast: tuple[bool, bool, bool]
    """For fprop, dgrad and wgrad: whether a kernel may sum in less than fp32."""
    stochastic: bool
    """Whether anything is rounded with random bits."""
    memories: tuple[Memory, ...]
    """The buffers that hold the states of quantizers."""
    moving: tuple[str, ...]
    """The tensors that have buffers which a step changes."""
    shares: bool
    """Whether all layers with the same static values encode an input alike, and encoding it is not free."""
    keeps_input: bool
    """Whether the input is kept for backward, which makes its column operand; ``keeps_weight`` likewise."""
    keeps_weight: bool
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
        kept, row, col = memories(recipe), recipe.x.side("row"), recipe.x.side("col")
        own = rounds_stochastically(recipe.x) or any(memory.tensor == "x" and memory.moves for memory in kept)
        shares, keeps = not own and not (row.plain and col.plain), (recipe.save_x == "input", recipe.save_w == "weight")
        moving = tuple(dict.fromkeys(memory.tensor for memory in kept if memory.moves))
        return cls(*tensors, fast_sums, stochastic, kept, moving, shares, *keeps, *of)

    def __post_init__(self) -> None:
        for quantizer in (self.x, self.w, self.dy):
            quantizer.ready()


def _made_exactly(side: Quantizer) -> bool:
    """Whether the format has kernels, for any hardware, that make an operand for a product without encoding it."""
    return bool(registry.kernels("exact_tile", (registry.format_of(type(side)).name,)))
