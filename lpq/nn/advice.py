"""Warnings of ``lpq.convert``: rules that do nothing, and large parts of a model that stay in high precision."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from lpq.nn.names import first_few, plain_name
from lpq.nn.reports import Report
from lpq.recipes import Policy, Schedule
from lpq.recipes.globs import exactly, matching, numberless
from lpq.recipes.rules import LEAVE

ROUTERS = ("gate", "router")
"""The parts of ``LEAVE`` that a layer of another kind may well have in its name."""
LARGE = 0.1
"""The share of the multiplied matrices that may stay in high precision without a warning."""


def warnings_of(
    policy: Policy,
    report: Report,
    names: Mapping[str, Sequence[str]],
    schedules: Mapping[str, Schedule],
    left_out: Mapping[str, str],
) -> Iterator[str]:
    """Yield the warnings about a conversion. ``names``: all names of each module."""
    for number, reason in report.misplaced:
        yield f"lpq.convert: rule {number} never holds: {reason}"
    every = [plain_name(alias) for aliases in names.values() for alias in aliases]
    with_recipe = {name for name, s in schedules.items() if any(recipe is not None for _, recipe in s.pieces)}
    linear = [entry for entry in report.left if entry.kind == "Linear"]
    if report.unmatched and not report.converted:
        yield (
            f"lpq.convert left every layer as it was: none matches {_unmatched(report, every)}; the linear layers of "
            f"this model are {first_few([repr(e.name) if e.name else 'the model itself' for e in linear]) or 'none'}"
        )
        return
    if not report.converted:
        if with_recipe or left_out:
            why = [f"{entry.name or 'the model'}: {entry.note}" for entry in report.left]
            yield f"lpq.convert left every layer as it was: {first_few(why, '; ') or 'the model has no parameters'}"
        return
    if report.unmatched:
        yield f"lpq.convert: no layer matches {_unmatched(report, every)}"
    yield from _named_in_vain(policy, report, names, with_recipe)
    yield from _left_in_vain(policy, every)
    routers = {n for n in left_out if policy.leave == LEAVE and set(ROUTERS).intersection(plain_name(n).split("."))}
    for modules in (with_recipe - left_out.keys(), routers):
        yield from _large_parts(report, modules)


def _named_in_vain(
    policy: Policy, report: Report, names: Mapping[str, Sequence[str]], with_recipe: Iterable[str]
) -> Iterator[str]:
    """Warn of patterns that give a recipe only to what cannot be converted, or skip only modules around layers."""
    inside = tuple(f"{entry.name}." for entry in report.converted)
    converted = {entry.name for entry in report.converted} | {n for n in names if n.startswith(inside)}
    notes = {entry.name: entry.note for entry in report.left}
    owners = {plain_name(alias): name for name, aliases in names.items() for alias in aliases}
    every = matching((pattern for rule in policy.rules for pattern in rule.match), tuple(owners))
    around = {"", *(name[:i] for name in converted for i, letter in enumerate(name) if letter == ".")}
    for number, rule in enumerate(policy.rules, 1):
        for pattern in rule.match:
            targets = list(dict.fromkeys(owners[alias] for alias in every[pattern]))
            if not targets or converted.intersection(targets):
                continue
            holder = f"it is no layer, and layers in it are called {targets[0]}.*"
            if rule.recipe is None:
                if around.intersection(targets) and not notes.keys() & targets:
                    yield f"lpq.convert: rule {number} skips {pattern!r}, and reaches no layer; {targets[0]}: {holder}"
            elif set(targets).intersection(with_recipe):
                name = next((n for n in targets if n in notes), targets[0])
                why = notes.get(name, holder)
                yield f"lpq.convert: rule {number} gives {pattern!r} a recipe, and reaches no layer; {name}: {why}"


def _left_in_vain(policy: Policy, names: Iterable[str]) -> Iterator[str]:
    """Warn of parts of names in ``leave`` that leave out nothing, except the default ones."""
    parts = {part for name in names for part in name.split(".")}
    for part in policy.leave:
        if part not in parts and part not in LEAVE:
            near = difflib.get_close_matches(part, parts, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"lpq.convert: leave has {part!r}, and no layer has that between the dots of its name{hint}"


def _large_parts(report: Report, modules: Collection[str]) -> Iterator[str]:
    """Warn if these modules hold many of the matrices in high precision, though no rule of the policy leaves them
    there."""
    coverage = report.coverage
    parts = [part for part in coverage.of(modules) if part.multiplied]
    if sum(part.elements for part in parts) > LARGE * coverage.multiplied:
        notes = {entry.name: entry.note for entry in report.left}
        first = max(parts, key=lambda part: part.elements)
        yield (
            f"lpq.convert: {coverage}. {first.name or 'the model'} stays in high precision: "
            f"{notes.get(first.module, 'it is in no module of its own')}. lpq.report(model) has the reason for each"
        )


def _unmatched(report: Report, names: Collection[str]) -> str:
    """Patterns that match nothing, each with the nearest name."""
    texts = []
    for pattern in report.unmatched:
        near = nearest(pattern, names)
        texts.append(f"{pattern!r}{f' (did you mean {near!r}?)' if near is not None else ''}")
    return first_few(texts)


def nearest(pattern: str, names: Iterable[str]) -> str | None:
    """A pattern for the name whose text or ending is nearest, with ``*`` for numbers; None if none is near."""
    ends: dict[str, str] = {}
    for short, escaped in {numberless(name): numberless(exactly(name)) for name in names}.items():
        parts = short.split(".")
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), escaped)
    close = difflib.get_close_matches(numberless(pattern), ends, n=1, cutoff=0.7)
    return ends[close[0]] if close else None
