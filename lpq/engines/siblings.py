"""Layers that engines make one layer of, which has one format and, where that has a scale of the whole, one scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from lpq.checkpoint.errors import CheckpointError
from lpq.registry import Group
from lpq.registry.showing import brief, listed

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"), ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek's
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),  # Qwen 3.5's
    ("gate_proj", "up_proj"), ("w1", "w3"), ("c_fc_0", "c_fc_1"),
)  # fmt: skip
"""Patterns of the last parts of the names of layers that are fused if they are beside each other.

vLLM's ``packed_modules_mapping`` has them. Names that other models give to layers which stay apart, as ``fc1``
and ``fc3``, are left out."""
EXPERTS = re.compile(r"((?:.*\.)?experts)\..*")
"""The names of layers in a block of experts, which engines hold in one layer."""
Siblings = Literal["alike", "any"]
"""A choice for layers that engines fuse: they must lie alike, or may lie in any way."""
HIGH = "high precision"


def fused(layers: Iterable[str], groups: Sequence[Sequence[str]] = FUSED) -> list[list[str]]:
    """The layers of each fused one."""
    by_parent: dict[tuple[str, int], list[str]] = {}
    for layer in layers:
        parent, _, leaf = layer.rpartition(".")
        for number, group in enumerate(groups):
            if any(fnmatchcase(leaf, pattern) for pattern in group):
                by_parent.setdefault((parent, number), []).append(layer)
    return [names for names in by_parent.values() if len(names) > 1]


def check_alike(groups: Iterable[Group], left: Iterable[str], siblings: Siblings) -> None:
    """Refuse layers that engines fuse and that have different schemes, or of which some are in high precision
    (``left``): engines fail to load them, each with another error."""
    if siblings not in get_args(Siblings):
        raise CheckpointError(f"siblings={brief(siblings)}: it is 'alike' or 'any'")
    if siblings == "any":
        return
    how: dict[str, Group | None] = dict.fromkeys(left)
    how |= {layer: group for group in groups for layer in group.layers}
    blocks: dict[str, list[str]] = {}
    for layer in sorted(how):
        if (block := EXPERTS.fullmatch(layer)) is not None:
            blocks.setdefault(block[1], []).append(layer)
    others = [layer for layer in sorted(how) if EXPERTS.fullmatch(layer) is None]
    unlike = [names for names in (*fused(others), *blocks.values()) if len({id(how[name]) for name in names}) > 1]
    if not unlike:
        return
    ways: dict[str, list[str]] = {}
    for name in unlike[0]:
        group = how[name]
        ways.setdefault(HIGH if group is None else group.title, []).append(name)
    quantized = [name for title, names in ways.items() if title != HIGH for name in names]
    ways_text = "; ".join(f"{listed(names)} in {title}" for title, names in ways.items())
    more = f" (the same holds in {len(unlike) - 1} more places)" if unlike[1:] else ""
    raise CheckpointError(
        f"engines make one layer of {listed(unlike[0])}, which has one format, and they lie in several ways: "
        f"{ways_text}{more}. Give all of them one recipe, or keep all in high precision, leave={brief(quantized)}; "
        "siblings='any' (lpq export --siblings any) is for engines that do not fuse layers"
    )
