"""Layers that engines fuse into one, and that then share a scale: those of one input, as ``q_proj`` and ``k_proj``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Patterns of the last parts of the names of layers that are fused if they are beside each other."""


def fused(layers: Iterable[str], groups: Sequence[Sequence[str]] = FUSED) -> list[list[str]]:
    """The layers of each fused one."""
    found: dict[tuple[str, int], list[str]] = {}
    for layer in layers:
        parent, _, leaf = layer.rpartition(".")
        for number, group in enumerate(groups):
            if any(fnmatchcase(leaf, pattern) for pattern in group):
                found.setdefault((parent, number), []).append(layer)
    return [names for names in found.values() if len(names) > 1]
