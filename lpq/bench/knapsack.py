"""One option for each layer, under a budget of time or of error: a knapsack, filled greedily.

An option takes time and adds to the squared error of the gradients. A layer's options that lie on the lower convex hull
of both are looked at: from the most exact one on, each next step saves time at a higher price in error. The steps of
all layers are taken in the order of this price. That is the best choice but for the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lpq.recipes import Recipe

ROUNDING = 1e-9
"""Sums that are equal but for their rounding are within a budget."""


@dataclass(frozen=True)
class Option:
    """A recipe for a layer."""

    products: tuple[str, ...]
    """The recipes that fprop, dgrad and wgrad are taken from."""
    recipe: Recipe
    seconds: float
    square: float
    """The squares of the errors that its products bring into the gradients, added up."""


def under_time(layers: Sequence[Sequence[Option]], seconds: float) -> list[Option]:
    """Choose the options with the least error that take no more time together. The fastest ones if there are none."""
    hulls = [hull(options) for options in layers]
    at = [0] * len(hulls)
    limit = seconds * (1 + ROUNDING)
    order: list[int] = []
    total = sum(each[0].seconds for each in hulls)
    for layer in _steps(hulls):
        if total <= limit:
            break
        total += hulls[layer][at[layer] + 1].seconds - hulls[layer][at[layer]].seconds
        at[layer] += 1
        order.append(layer)
    for layer in reversed(order):  # what the last step saved too much pays for others
        back = hulls[layer][at[layer] - 1].seconds - hulls[layer][at[layer]].seconds
        if total + back <= limit:
            total += back
            at[layer] -= 1
    return [each[i] for each, i in zip(hulls, at, strict=True)]


def under_error(layers: Sequence[Sequence[Option]], error: float) -> list[Option]:
    """Choose the options that take the least time and whose squared errors together are no more than ``error``'s."""
    hulls = [hull(options) for options in layers]
    at = [0] * len(hulls)
    limit, total = error * error * (1 + ROUNDING), sum(each[0].square for each in hulls)
    full: set[int] = set()
    for layer in _steps(hulls):
        more = hulls[layer][min(at[layer] + 1, len(hulls[layer]) - 1)].square - hulls[layer][at[layer]].square
        if layer in full or total + more > limit:
            full.add(layer)
            continue
        total += more
        at[layer] += 1
    return [each[i] for each, i in zip(hulls, at, strict=True)]


def hull(options: Sequence[Option]) -> list[Option]:
    """The options that are worth their error, from the most exact to the fastest one; of equal ones whole recipes."""
    points: list[Option] = []
    for option in sorted(options, key=lambda one: (one.square, one.seconds, len({*one.products}))):
        if points and option.seconds >= points[-1].seconds:
            continue
        while len(points) > 1 and _price(points[-2], points[-1]) >= _price(points[-1], option):
            points.pop()
        points.append(option)
    return points


def _price(slow: Option, fast: Option) -> float:
    """The error that a second costs which the faster option saves."""
    return (fast.square - slow.square) / (slow.seconds - fast.seconds)


def _steps(hulls: Sequence[Sequence[Option]]) -> list[int]:
    """The layers whose next step is taken, the cheapest step first. The steps of one layer stay in their order."""
    priced = [
        (_price(slow, fast), layer, number)
        for layer, each in enumerate(hulls)
        for number, (slow, fast) in enumerate(pairwise(each))
    ]
    return [layer for _, layer, _ in sorted(priced)]
