"""Changes of the recipes of layers that ranks share: all ranks take another recipe, or none does."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TypeVar

import torch.distributed as dist

from lpq.distributed import meeting
from lpq.distributed.alike import REMEDY, Comparison, SharedLayer
from lpq.distributed.ranks import Ranks, sharing
from lpq.recipes import Recipe
from lpq.registry.warning import warn
from lpq.torch_private.distributed import is_imitated

L = TypeVar("L", bound=SharedLayer)


def withhold(layers: Mapping[L, Comparison], changes: Mapping[L, Recipe | None]) -> Mapping[L, str]:
    """Return the layers that are to keep their recipes, since not all ranks that share them have come to change one,
    each with the change in words. Warn of it, and have ranks make the comparison of each before an optimizer's step."""
    sets: dict[tuple[int, ...], tuple[Ranks, list[L]]] = {}
    for layer in layers if dist.is_initialized() and not is_imitated() else ():
        for ranks in sharing([layer.shared_weight()]):
            sets.setdefault(tuple(ranks.names), (ranks, []))[1].append(layer)
    reasons: dict[L, str] = {}
    end = monotonic() + (limit := meeting.limit() if sets else 0.0)
    for ranks, own in sets.values():
        again = any(layers[layer].withholds for layer in own)  # the others wait in a collective: no longer than once
        seconds = 0.0 if again else end - monotonic()
        if meeting.meet(ranks.names, "a change of recipes", "", seconds, _WAITING) is not None:
            continue
        if not again:
            others = f", and {len(own) - 1} more" if len(own) > 1 else ""
            warn(
                f"{own[0].title}{others}: the recipe was changed on this rank, and within {limit:.0f} s not on all "
                "ranks that share the layer. This rank keeps the former one, as they do, and all raise before the next "
                f"step of an optimizer. {REMEDY}"
            )
        for layer in own:
            text = None if (recipe := changes[layer]) is None else recipe.text
            reasons[layer] = f", which rank {ranks.names[ranks.rank]} was to change to {text} without all others"
            layers[layer].withhold()
    return reasons


_WAITING = (
    f"this rank changes a recipe, and another rank that shares the layer has not for {meeting.PATIENCE:.0f} s. It is "
    f"late, or the recipe was changed on this rank alone, which then keeps the former one. {REMEDY}"
)
