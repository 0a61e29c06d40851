"""Recipes from names, from text, from mappings and from TOML files, all by the same rules. A recipe in parts is keys
and values. A key stands for operands: ``wgrad`` (both of a product), ``dy`` (both of a tensor) or ``wgrad.dy`` (one,
which wins over a wider key). A value gives them a quantizer: the quantizer that the recipe with this name has for the
same operand, or else the quantizer itself; with parentheses, as in ``mxfp8()``, it is always a quantizer.
"""

from __future__ import annotations

import os.path
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.recipes import toml
from lpq.recipes.errors import PluginRecipeError, RecipeError, RecipeWarning, UnknownKey, place
from lpq.recipes.gemms import GEMMS, OPERANDS, SAVES, TENSORS, Gemm, GemmOperand, Recipe, check_save
from lpq.registry import RecipeSpec
from lpq.registry.errors import LpqError, PluginError, UnknownFormat, UnknownRecipe, suggestion
from lpq.registry.grammar import NAME, split_items
from lpq.registry.registry import cached
from lpq.registry.shipped import policies, policy_file
from lpq.registry.showing import brief
from lpq.registry.warning import warn

RecipeLike: TypeAlias = "Recipe | Quantizer | str | Path | Mapping[str, object]"

SUMS = {f"{gemm}.fast_accumulate": gemm for gemm in GEMMS}
KEPT = {f"{tensor}.save": tensor for tensor in SAVES}
KEYS = (*GEMMS, *TENSORS, *map(str, OPERANDS), *SUMS, *KEPT, "name")


def recipe(source: RecipeLike) -> Recipe:
    """Make a recipe.

    Args:
        source: One of these:

            - the name of a recipe, ``"nvfp4"``, or a quantizer for every operand, ``"mxfp8(dtype=e5m2)"``
            - the grammar: ``"fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"``
            - a mapping with the same keys, nested or not: ``{"fprop": "mxfp8", "dgrad": {"dy": "mxfp8", "w": …}, …}``
            - a TOML file with such a table: a ``Path``, or a string that ends in ``.toml``; or its text
            - a recipe, which is returned as it is
    """
    return _recipe(source, ())


@cached
def high_precision() -> Recipe:
    """The recipe that multiplies all tensors as they are."""
    return recipe("identity")


def _recipe(source: object, within: tuple[str, ...]) -> Recipe:
    """``within``: the named recipes that are being made, of which this is a part."""
    source = toml.parsed(source)
    if isinstance(source, Mapping):
        return _from_items(_flat(source), None, within)
    if path := toml.path(source):
        table = toml.read(path)
        with place(str(path)):
            return _from_items(_flat(table), path.stem, within)
    if isinstance(source, str) and "=" in source.partition("(")[0]:
        first = source.partition("=")[0]
        if "," in first:
            base = first.partition(",")[0].strip()
            raise RecipeError(
                f"{brief(base)} stands without a key in {brief(source.strip())}. A recipe that is another one but for "
                "some operands says what each gets, as in "
                f"'x={base}, w={base}, dy=…' or 'fprop={base}, dgrad=…, wgrad=…'"
            )
        return _from_items(split_items(source), source.strip(), within)
    value = _value(source, within)
    if isinstance(value, Recipe):
        return value
    gemm = Gemm(value, value)
    return Recipe(gemm, gemm, gemm, name=str(source).strip())


def _from_items(items: Iterable[tuple[str, object]], name: object, within: tuple[str, ...]) -> Recipe:
    quantizers: dict[GemmOperand, Quantizer] = {}
    givers: dict[GemmOperand, str] = {}
    sums: dict[str, bool | None] = {}
    saves: dict[str, str] = {}
    for key, value in sorted(items, key=lambda item: "." in item[0]):  # the wide keys first
        _check_key(key)
        if key == "name":
            name = value
            continue
        with place(key):
            if key in SUMS:
                sums[SUMS[key]] = _flag(value)
                continue
            if key in KEPT:
                check_save(KEPT[key], value)
                saves[KEPT[key]] = cast("str", value)
                continue
            source = _value(value, within)
        for operand in OPERANDS:
            if operand.belongs_to(key):
                giver = givers.get(operand)
                if giver is not None and ("." in giver or "." not in key):
                    raise RecipeError(f"{giver} and {key} both give {operand}: let one of them leave it out")
                givers[operand] = key
                quantizers[operand] = source.operands[operand] if isinstance(source, Recipe) else source
        if isinstance(source, Recipe) and "." not in key:
            if key in GEMMS:
                sums[key] = source.gemm(key).fast_accumulate
            of_col = {o.tensor for o in OPERANDS if o.side == "col" and o.belongs_to(key)}
            saves |= {tensor: save for tensor, save in source.saves.items() if tensor in of_col}
    if absent := min((_absent(quantizers, keys) for keys in (GEMMS, TENSORS)), key=len):
        raise RecipeError(
            f"nothing is said of {' and '.join(absent)}: add {', '.join(f'{key}=…' for key in absent)} "
            "with the name of a recipe or a quantizer"
        )
    fprop, dgrad, wgrad = (
        Gemm(quantizers[a], quantizers[b], sums.get(a.gemm)) for a, b in zip(OPERANDS[::2], OPERANDS[1::2], strict=True)
    )
    save_fields = {f"save_{tensor}": save for tensor, save in saves.items()}
    return Recipe(fprop, dgrad, wgrad, cast("str | None", name), **save_fields)


def _check_key(key: str) -> None:
    if key in ("rules", "leave", "least"):
        raise RecipeError("this is a policy, since it has rules: lpq.policy takes it")
    if set(key) & set("*?["):
        raise UnknownKey(
            f"{brief(key)} is a pattern of layers: {{'rules': [{{'match': {brief(key)}, 'recipe': …}}]}} is a policy"
        )
    if key not in KEYS:
        raise UnknownKey(f"unknown key {brief(key)}: {suggestion(key, KEYS)}")


def _absent(operands: Container[GemmOperand], keys: Sequence[str]) -> list[str]:
    """Names for all operands that are not given: a key if both of its operands are absent, else the absent operand."""
    absent: list[str] = []
    for key in keys:
        own = [str(operand) for operand in OPERANDS if operand.belongs_to(key) and operand not in operands]
        absent += [key] if len(own) == 2 else own
    return absent


def _value(value: object, within: tuple[str, ...]) -> Recipe | Quantizer:
    """The recipe or quantizer that a name or a quantizer string stands for."""
    if isinstance(value, Recipe | Quantizer):
        return value
    if not isinstance(value, str):
        raise RecipeError(f"expected the name of a recipe or a quantizer, not {brief(value)}")
    name = value.strip()
    if not name:
        raise RecipeError(
            "a recipe needs a name, and this is empty: `lpq recipes` lists them; 'bf16' is high precision"
        )
    if not NAME.fullmatch(name):
        _refuse_file(name)
        return cast("Quantizer", registry.quantizer(name))
    try:
        spec = registry.recipe_spec(name)
    except UnknownRecipe:
        return _format(name, within)
    return _from_spec(spec, within)


def _refuse_file(name: str) -> None:
    if os.path.isfile(name):
        raise RecipeError(f"{name} is a file: one in TOML ends in .toml, or is given as a pathlib.Path")


def _format(name: str, within: tuple[str, ...]) -> Recipe | Quantizer:
    """The default quantizer of a format, for a name that no recipe has; or the recipe that other libraries call so."""
    try:
        quantizer = cast("Quantizer", registry.quantizer(name))
        recipes = [recipe for p in registry.plugins() if name in p.formats for recipe in p.recipes]
        if recipes and not within:
            warn(
                f"{name!r} is a format and no recipe: operands get {name}() with its default options. Recipes of its "
                f"plugin: {', '.join(recipes)}; for the bare format write {name}()",
                RecipeWarning,
            )
        return quantizer
    except UnknownFormat:
        if (spec := registry.recipe_known_as(name)) is not None:
            warn(
                f"{name!r} is what other libraries call it: lpq takes its recipe {spec.name!r} "
                f"(`lpq explain {spec.name}` shows it)",
                RecipeWarning,
            )
            return _from_spec(spec, within)
        _refuse_file(name)
        if policy_file(name) is not None:
            raise RecipeError(f"{name} is a policy and not a recipe: pass it to lpq.convert or lpq.policy") from None
        names = {*registry.recipes(), *registry.formats(), *policies()}
        raise UnknownRecipe(
            f"there is no recipe, policy or format {brief(name)} here: {suggestion(name, names)} "
            "(`lpq recipes` and `lpq formats` list them; each name begins with the name of its plugin)"
        ) from None


def _from_spec(spec: RecipeSpec, within: tuple[str, ...]) -> Recipe:
    """The recipe that a plugin brings."""
    try:
        if spec.name in within:
            circle = " → ".join((*within[within.index(spec.name) :], spec.name))
            raise RecipeError(f"it is made of itself ({circle}); the format would be {spec.name}()")
        return replace(_recipe(spec.recipe, (*within, spec.name)), name=spec.name)
    except PluginRecipeError:
        raise  # this recipe is at fault, not a recipe that is made of it
    except LpqError as error:
        plugin = next(p for p in registry.plugins() if spec.name in p.recipes)
        told = any(isinstance(cause, PluginError) for cause in (error, error.__cause__))  # with a remedy of its own
        remedy = "" if told else "\nRemedy: install what it needs, or correct it; other recipes still work."
        raise PluginRecipeError(f"recipe {spec.name} of {plugin.title} cannot be built: {error}{remedy}") from error


def _flat(table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The items of a table, ``{"wgrad": {"dy": …}}`` as ``wgrad.dy``."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", v) for inner, v in value.items())
        else:
            yield str(key), value


def _flag(value: object) -> bool:
    if value in ("true", "false"):  # as the grammar spells it
        return value == "true"
    if not isinstance(value, bool):
        raise RecipeError(f"it must be true or false, not {brief(value)}")
    return value
