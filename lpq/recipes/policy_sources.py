"""Policies from mappings and TOML files with rules, and from anything that makes a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lpq.recipes import toml
from lpq.recipes.errors import RecipeError, UnknownKey, place
from lpq.recipes.gemms import Recipe
from lpq.recipes.recipe_sources import RecipeLike, recipe
from lpq.recipes.rules import LEAVE, Policy, Rule
from lpq.registry.errors import suggestion
from lpq.registry.grammar import SKIP
from lpq.registry.shipped import policy_file
from lpq.registry.showing import brief

PolicyLike: TypeAlias = "Policy | RecipeLike"
Include: TypeAlias = Literal["all"] | None

RULES = "rules"
REMEDIES = {"match": "'*' is every layer", "recipe": f"{SKIP!r} leaves a layer alone"}
KEYS = (*REMEDIES, "until", "blocks")
TABLE = (RULES, "leave", "least", "stacks")


def policy(source: PolicyLike, *, include: Include = None) -> Policy:
    """Make a policy.

    No rule gives a recipe to layers with fewer than 16 inputs or outputs, as adapters are, unless a pattern of it
    matches such layers only; ``"least": 16`` beside ``"rules"`` is that number.

    Args:
        source: One of these:

            - a mapping: ``{"rules": [{"match": "lm_head", "recipe": "skip"}, {"match": "*", "recipe": "nvfp4"}]}``;
              ``match`` may be a list of patterns, ``until`` ends a rule, before a step or at a fraction of a run, and
              ``blocks`` has it hold in the ``"first 2"`` or ``"last 15%"`` of the blocks
            - the name of a policy that comes with lpq, as ``"nvfp4-pretrain"``: ``lpq recipes`` lists them
            - a TOML file with such ``[[rules]]``: a ``Path``, or a string that ends in ``.toml``; or its text
            - anything that ``lpq.recipe`` takes: that recipe for all layers but layers with ``lm_head``, ``gate`` or
              ``router`` between the dots of their names, as by ``"leave": ["lm_head", "gate", "router"]`` beside
              ``"rules"``
            - a policy, which is returned as it is
        include: ``"all"`` has rules mean all layers that they match: nothing is left out by name or size.
    """
    if include not in (None, "all"):
        raise RecipeError(f"include={include!r}: it is 'all' or None")
    result = _policy(source)
    return result.without_exceptions() if include == "all" else result


def refuse_rules(source: str, remedy: str) -> None:
    """Raise an error if ``source`` is a policy, by its name or its file, where a recipe is wanted."""
    path = toml.path(source)
    if path is not None and RULES in toml.read(path):
        raise RecipeError(f"{path} is a policy and not a recipe, since this file has rules: {remedy}")
    if policy_file(source) is not None:
        raise RecipeError(f"{source} is a policy and not a recipe: {remedy}")


def _policy(source: PolicyLike) -> Policy:
    if isinstance(source, Policy):
        return source
    if source == SKIP:
        raise RecipeError(
            f"{SKIP!r} is no recipe: in a rule of a policy it leaves layers alone. A model that is to stay as it is "
            "need not be converted"
        )
    if isinstance(source, list | tuple):
        raise RecipeError(f"rules go into a table: {{{RULES!r}: […]}}, and this is {brief(source)}")
    path = toml.path(source) or policy_file(source)
    table = toml.read(path) if path else toml.parsed(source)
    lists = isinstance(table, Mapping) and any(isinstance(value, list) for value in table.values())
    if not isinstance(table, Mapping) or not (lists or any(key in table for key in (*TABLE, *KEYS))):  # as in no recipe
        return Policy((Rule(("*",), recipe(source)),), LEAVE)
    if path is None:
        return _from_table(table, Path())
    with place(str(path)):
        return _from_table(table, path.parent)


def _from_table(table: Mapping[str, object], folder: Path) -> Policy:
    """``folder``: the folder to which paths of recipe files in the rules are relative."""
    _check_keys(table, TABLE)
    if RULES not in table:
        raise RecipeError(f"a policy has rules, and this has only {', '.join(table)}")
    entries, leave = table[RULES], table.get("leave", ())
    if not isinstance(entries, list | tuple):
        raise RecipeError(f"{RULES} must be a list of rules, not {brief(entries)}")
    rules: list[Rule] = []
    recipes: dict[object, Recipe | None] = {}
    for number, entry in enumerate(entries, 1):
        with place(f"rule {number}"):
            rules.append(entry if isinstance(entry, Rule) else _rule(entry, folder, recipes))
    parts = tuple(leave) if isinstance(leave, list) else leave
    others = {"least": table["least"]} if "least" in table else {}
    stacks = _stacks(table.get("stacks", ()))
    return Policy(tuple(rules), parts, stacks=stacks, **others)  # type: ignore[arg-type]  # which are checked there


def _stacks(value: object) -> tuple[tuple[str, int], ...]:
    entries: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if not isinstance(entry, Mapping) or set(entry) != {"name", "blocks"} or type(entry["blocks"]) is not int:
            raise RecipeError(
                f"stacks is a list of tables with a name and the number of its blocks, not {brief(value)}"
            )
    return tuple((str(entry["name"]), entry["blocks"]) for entry in entries)


def _rule(entry: object, folder: Path, recipes: dict[object, Recipe | None]) -> Rule:
    """``recipes``: the recipes of the policy by their texts, as rules share them."""
    if not isinstance(entry, Mapping):
        raise RecipeError(f"a rule is a table with {', '.join(KEYS)}, not {brief(entry)}")
    _check_keys(entry, KEYS)
    for key, remedy in REMEDIES.items():
        if key not in entry:
            raise RecipeError(f"it has no {key}: {remedy}")
    match, source = entry["match"], entry["recipe"]
    patterns = (match,) if isinstance(match, str) else tuple(match) if isinstance(match, list) else match
    if path := toml.path(source):
        source = folder / path
    text = source if isinstance(source, str | Path) else object()
    if text not in recipes:
        with place("recipe"):
            recipes[text] = None if source in (None, SKIP) else recipe(source)
    return Rule(patterns, recipes[text], entry.get("until"), entry.get("blocks"))


def _check_keys(table: Mapping[str, object], keys: tuple[str, ...]) -> None:
    for key in table:
        if key in KEYS and keys == TABLE:
            raise RecipeError(f"a rule goes into a list: {{{RULES!r}: [{{'match': …, 'recipe': …}}]}}")
        if key not in keys:
            raise UnknownKey(f"unknown key {brief(key)}: {suggestion(str(key), keys)}")
