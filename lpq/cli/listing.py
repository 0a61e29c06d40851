"""``lpq formats``, ``lpq recipes``, ``lpq plugins``: the formats, recipes and plugins that are installed.

A plugin that cannot be used is reported on stderr; the others are listed all the same. Nothing here needs a GPU, and
nothing imports torch but to try recipes that other distributions bring, or to order recipes for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

import lpq
from lpq import registry
from lpq.cli.output import Json, as_json, print_broken, print_text
from lpq.registry.errors import LpqError, words
from lpq.registry.loader import PluginInfo
from lpq.registry.shipped import policies
from lpq.registry.tables import table

Full = Annotated[bool, typer.Option("--full", help="Name the recipes and kernels of each, not only their number.")]

For = Annotated[str, typer.Option("--for", metavar="GPU", help="Order them by what they gain on a GPU, as h100.")]
TOKENS, WIDTH = 8192, 4096
"""The size of the linear layer for which recipes are ordered."""
BLOCKS, PARTS, STEPS = 32, ("attention", "mlp"), 100
"""The model for which policies are ordered: its blocks, the layer of that size in each, and the steps of its run."""


def formats(json: Json = False) -> None:
    """List the number formats that are installed, other packages' formats included."""
    plugins = registry.plugins()
    pairs = [(plugin, spec) for plugin in plugins for spec in plugin.formats.values()]
    if json:
        as_json(
            [
                {
                    "name": spec.name,
                    "summary": spec.summary,
                    "effective_bits": spec.effective_bits,
                    "kernels": len(spec.kernels),
                    **origin(plugin),
                }
                for plugin, spec in pairs
            ]
        )
    else:
        table(
            "Formats",
            ("name", "bits", "from", "summary"),
            ((s.name, bits(s.effective_bits), f"{p.distribution} {p.version}", s.summary) for p, s in pairs),
        )
    print_broken(plugins)


def recipes(gpu: For = "", json: Json = False) -> None:
    """List the named recipes, and the policies that come with lpq. `lpq explain NAME` shows what a recipe does.

    A recipe that cannot be built is listed with the reason. The exit status is 0 all the same.
    With --for the recipe to begin with comes first, and then those that are predicted to save most time, as policies
    are ordered, too. `lpq advise` predicts it for a model.
    """
    plugins = registry.plugins()
    pairs = [(plugin, spec) for plugin in plugins for spec in plugin.recipes.values()]
    # lpq's own can be built if its plugins are in order: the tests check that, and trying them takes a second
    wrong = broken_recipes(plugins if any(p.error if p.builtin else p.recipes for p in plugins) else ())
    names = [s.name for _, s in pairs if s.name not in wrong]
    gains, first, remark = predicted_gains(names, policies(), gpu) if gpu else ({}, (), None)
    pairs.sort(key=lambda pair: (pair[1].name not in first[:1], -gains.get(pair[1].name, 0)))
    own_policies = sorted(policies().items(), key=lambda item: -gains.get(item[0], 0))
    if json:
        own = {"plugin": None, "distribution": "lpq", "version": lpq.__version__}
        rows = [
            entry(
                s.name, "recipe", s.summary, origin(p), aliases=list(s.aliases), recipe=plain(s.recipe),
                broken=wrong.get(s.name), gain=gains.get(s.name),
            )
            for p, s in pairs
        ]  # fmt: skip
        as_json([*rows, *(entry(name, "policy", about, own, gain=gains.get(name)) for name, about in own_policies)])
    else:
        table(
            "Recipes",
            ("name", "gain", "from", "summary", "elsewhere called", "what is wrong"),
            (
                (
                    s.name,
                    figure(gains.get(s.name)),
                    f"{p.distribution} {p.version}",
                    s.summary,
                    " ".join(s.aliases),
                    wrong.get(s.name),
                )
                for p, s in pairs
            ),
        )
        if remark is not None:
            print_text(remark)
        of_policies = [(name, figure(gains.get(name)), about) for name, about in own_policies]
        table("Policies", ("name", "gain", "summary"), of_policies)
        if remark is not None:
            print_text(OF_POLICIES)
    print_broken(plugins)


def plugins(full: Full = False, json: Json = False) -> None:
    """List the plugins: where each comes from, what it brings, and what is wrong with it."""
    every = registry.plugins()
    if json:
        as_json([described(plugin) for plugin in every])
        return
    table(
        "Plugins",
        ("name", "from", "status", "formats", "recipes", "kernels"),
        (
            (
                plugin.name,
                f"{plugin.distribution} {plugin.version}",
                plugin.status,
                " ".join(plugin.formats),
                "\n".join(plugin.recipes) if full else len(plugin.recipes),
                "\n".join(f"{k.op}: {k.backend} {k.impl}" for k in plugin.kernels) if full else len(plugin.kernels),
            )
            for plugin in every
        ),
    )
    print_broken(every)


OF_POLICIES = (
    f"gain of a policy: of a model with {BLOCKS} blocks, each with such a layer in its attention and in its MLP, over "
    "all steps of a run."
)


def figure(gain: float | None) -> str | None:
    return None if gain is None else f"{gain:.2f}"


def predicted_gains(
    names: Iterable[str], policies: Iterable[str], gpu: str
) -> tuple[dict[str, float], tuple[str, ...], str]:
    """How many times as fast as bf16 a linear layer is predicted to be by each recipe, and the layers of a model by
    each policy; the recipes to begin with; and words on these numbers."""
    from lpq.bench.gpus import predicted  # with torch, which a list without an order does without
    from lpq.bench.layers import LayerSize
    from lpq.bench.native import to_begin_with
    from lpq.cli.advise import gpu_named, not_compared, provenance

    card, _ = gpu_named(gpu, "--for")
    size = LayerSize(TOKENS, WIDTH, WIDTH)
    plain = predicted(card, size, None)
    recipes = {name: {lpq.recipe(name)} for name in names}
    gains = {name: plain / predicted(card, size, recipe) for name, (recipe,) in recipes.items()}
    layers = [f"blocks.{number}.{part}" for number in range(BLOCKS) for part in PARTS]
    for name in policies:
        placed = lpq.policy(name).placed(layers)
        schedules = [placed.schedule(layer, STEPS) for layer in layers]
        held = Counter(schedule.at(step) for schedule in schedules for step in range(STEPS))
        gains[name] = held.total() * plain / sum(n * predicted(card, size, recipe) for recipe, n in held.items())
        recipes[name] = {recipe for recipe in held if recipe is not None}
    words = (
        f"gain: how many times as fast as bf16 a layer of {WIDTH} inputs and outputs is predicted to be for {TOKENS} "
        f"tokens. {provenance(card)}"
    )
    last = "Compare the loss by `lpq compare` before you choose codes of 4 bits."
    return gains, to_begin_with(card.sm), " ".join([words, *not_compared(recipes, card), last])


def described(plugin: PluginInfo) -> dict[str, Any]:
    """A plugin as plain data."""
    error = plugin.error
    return {
        "name": plugin.name,
        **{key: value for key, value in origin(plugin).items() if key != "plugin"},
        "builtin": plugin.builtin,
        "status": plugin.status,
        "formats": list(plugin.formats),
        "recipes": list(plugin.recipes),
        "kernels": [kernel.impl for kernel in plugin.kernels],
        "cause": error.cause if error else None,
        "remedy": error.remedy if error else None,
    }


def entry(name: str, kind: str, summary: str, origin: Mapping[str, str | None], **facts: Any) -> dict[str, Any]:
    """A recipe or a policy as plain data; ``facts`` are known of recipes alone."""
    unknown: dict[str, Any] = {"aliases": [], "recipe": None, "broken": None, "gain": None}
    return {"name": name, "kind": kind, "summary": summary, **unknown, **facts, **origin}


def origin(plugin: PluginInfo) -> dict[str, str]:
    return {"plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}


def bits(effective: float | None) -> str:
    return "depends" if effective is None else f"{effective:g}"


def plain(recipe: Any) -> Any:
    """A recipe's source for JSON: the grammar, or nested dicts; any other object in words."""
    if isinstance(recipe, Mapping):
        return {str(key): plain(value) for key, value in recipe.items()}
    return recipe if isinstance(recipe, str | bool | int | float | None) else str(recipe)


def broken_recipes(plugins: Iterable[PluginInfo]) -> dict[str, str]:
    """Their named recipes that cannot be built, and why."""
    broken: dict[str, str] = {}
    for plugin in plugins:
        for name in plugin.recipes:
            try:
                lpq.recipe(name)
            except Exception as error:
                broken[name] = fault(plugin, error)
    return broken


def fault(plugin: PluginInfo, error: Exception) -> str:
    """Describe a fault in something that a plugin brings. It must not hide the lines of other plugins."""
    return str(error) if isinstance(error, LpqError) else f"{plugin.title} is at fault: it raised {words(error)}"
