"""Blocks of a model by their place: the first or the last ones of a list of layers, such as ``model.layers``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from lpq.recipes.errors import RecipeError
from lpq.registry.showing import brief

SPAN = re.compile(r"(first|last) (\d+) ?(%?)")
WORDS = "'first 2', 'last 15%' or several of these with commas"


class Span(NamedTuple):
    """Some blocks at one end."""

    end: str
    size: int
    percent: bool

    def holds(self, index: int, count: int) -> bool:
        """Whether the block with this index is among them, of ``count``."""
        size = -(-self.size * count // 100) if self.percent else self.size
        return index < size if self.end == "first" else index >= count - size


@cache
def spans(text: str) -> tuple[Span, ...]:
    """The spans that ``Rule.blocks`` names."""
    matches = [SPAN.fullmatch(part.strip()) for part in text.split(",")]
    result = [Span(match[1], int(match[2]), bool(match[3])) for match in matches if match is not None]
    if len(result) < len(matches) or any(not span.size or (span.percent and span.size > 100) for span in result):
        raise RecipeError(f"blocks must be {WORDS}, and is {brief(text)}")
    return tuple(result)


def block_of(name: str) -> tuple[str, int] | None:
    """The outermost list of blocks in which a module is, by its dotted name, and the place in it."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def stacks_of(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """The lists of blocks among all modules of a model, and how many blocks each has."""
    blocks: dict[str, set[int]] = {}
    for name in names:
        if (block := block_of(name)) is not None:
            blocks.setdefault(block[0], set()).add(block[1])
    for name, indices in blocks.items():
        if min(indices) > 0:
            raise RecipeError(
                f"a rule is for the first or last blocks, and {name or 'the model'} begins with block {min(indices)}, "
                "as a stage of a pipeline does: convert the model before it is cut, or have the policy say how many "
                f"blocks the whole model has, by stacks = [{{name = {name!r}, blocks = …}}] beside its rules"
            )
    return tuple((name, max(indices) + 1) for name, indices in sorted(blocks.items()))
