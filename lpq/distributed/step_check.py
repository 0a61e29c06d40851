"""The comparison of what ranks reduce after a step of an optimizer, before the first one and where it has changed.

Values are reduced in one flat tensor, in the order of the optimizer's parameters or of the model. With other parameters
on one rank, or in another order, values of different layers would be mixed in silence, or ranks wait in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lpq.distributed.alike import compare_in_store
from lpq.distributed.ranks import Ranks
from lpq.operations.reduce_statistics import Parts
from lpq.registry.showing import listed

DIFFER = "the ranks do not step the same parameters"
REMEDY = "Give the optimizer the same parameters in the same order on all ranks, and take its steps on all"
WAITING = (
    "ranks compare the parameters that an optimizer steps before they reduce statistics of these, and not all have "
    f"come. {REMEDY}"
)


class Compared(Protocol):
    """An optimizer, as far as ranks have compared it."""

    reduced: Mapping[tuple[object, ...], list[int]]
    """The numbers of values that were reduced last, by the ranks and the device."""


def compare_reductions(optimizer: Compared, parts: Parts) -> None:
    """Raise on all ranks that reduce values together unless all have values of the same layers in the same order.
    Nothing is compared while their numbers are as in the last step."""
    sizes = {key: [value.numel() for _, value in part] for key, (_, part) in parts.items()}
    if sizes == optimizer.reduced:
        return
    by_ranks: dict[tuple[int, ...], tuple[Ranks, list[str]]] = {}
    for (_, ranks, device), (group, part) in sorted(parts.items(), key=lambda one: (one[0][1], one[0][0])):
        texts = by_ranks.setdefault(ranks, (Ranks(group, device=device), []))[1]
        texts += [f"{value.numel()} statistics of {listed([one.title for one in own])}" for own, value in part]
    compare_in_store(by_ranks.values(), "reductions", (DIFFER, REMEDY, WAITING))
    optimizer.reduced = sizes
