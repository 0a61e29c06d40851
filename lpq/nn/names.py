"""Names of modules: as their authors gave them, and in short texts for many.

``model.layers.0–79.mlp.*_proj`` stands for 240 of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lpq.torch_private.wrappers import WRAPPED

SHOWN = 3
Parts = tuple[frozenset[str], ...]
"""A group of names: for each place between two dots, the segments that stand there."""


def plain_name(name: str) -> str:
    """A name without the parts that compiling a module, or checkpointing its activations, adds to it."""
    name += "."
    for wrapped in WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name.removesuffix(".")


def grouped(names: Iterable[str], others: Collection[str] = ()) -> list[tuple[str, list[str]]]:
    """Group names that differ in one place; return for each group a text, and its names in their order.

    A group has all combinations of the segments in its places. A ``*`` in its text fits no name of ``others``.
    """
    order = {name: i for i, name in enumerate(names)}
    groups: dict[Parts, list[str]] = {tuple(frozenset((p,)) for p in n.split(".")): [n] for n in order}
    places = range(max((len(parts) for parts in groups), default=0))
    for numbers in (True, False):  # layers in a row first
        for place in reversed(places):
            groups = _merged(groups, place, numbers)
    texts = [(_called(parts, others, order), sorted(own, key=order.__getitem__)) for parts, own in groups.items()]
    return sorted(texts, key=lambda group: order[group[1][0]])


def first_few(words: Sequence[str], between: str = ", ") -> str:
    """The first three names."""
    return between.join([*words[:SHOWN], *(["…"] if words[SHOWN:] else [])])


def _merged(groups: Mapping[Parts, list[str]], place: int, numbers: bool) -> dict[Parts, list[str]]:
    """Join the groups that differ in this place only. ``numbers``: only those that have nothing but numbers there."""
    merged: dict[Parts, list[str]] = {}
    keys: dict[tuple[Parts, Parts], Parts] = {}
    for parts, members in groups.items():
        if place >= len(parts) or (numbers and not all(map(str.isdecimal, parts[place]))):
            merged[parts] = members
            continue
        rest = (parts[:place], parts[place + 1 :])
        before = keys.get(rest)
        there = parts[place] | (before[place] if before is not None else frozenset())
        keys[rest] = (*parts[:place], there, *parts[place + 1 :])
        merged[keys[rest]] = [*(merged.pop(before) if before is not None else []), *members]
    return merged


def _called(parts: Parts, others: Collection[str], own: Collection[str]) -> str:
    words = []
    for place, segments in enumerate(parts):
        rest = [at for at in range(len(parts)) if at != place]
        split = (name.split(".") for name in others if name not in own)
        beside = (n[place] for n in split if len(n) == len(parts) and all(n[at] in parts[at] for at in rest))
        words.append(_segment(segments, beside))  # which few places need: names of all layers would be split for each
    return ".".join(words)


def _segment(segments: frozenset[str], there: Iterable[str]) -> str:
    """The text for one place of a name, at which the names have these segments."""
    if len(segments) == 1:
        return next(iter(segments))
    if all(segment.isdecimal() for segment in segments):
        return _ranges(sorted(map(int, segments)))
    ordered = sorted(segments)
    shortest = min(ordered, key=len)
    ends = next((e for i in range(len(shortest)) if all(s.endswith(e := shortest[i:]) for s in ordered)), "")
    glob = f"*{ends}" if len(ends) > 2 else ""
    if glob and not any(fnmatchcase(other, glob) for other in {*there} - segments):
        return glob
    return f"{{{','.join(ordered)}}}"


def _ranges(numbers: list[int]) -> str:
    """``0–3``, or ``{0–3,5}``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
    return text if len(runs) == 1 else f"{{{text}}}"
