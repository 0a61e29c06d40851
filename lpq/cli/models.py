"""The models that commands are told of: by a shape, by a configuration of Hugging Face's, or by a function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import torch
import typer
from torch import nn
from torch.nn.parameter import is_lazy

import lpq
from lpq import registry
from lpq.bench.layers import LayerSize, StackSize
from lpq.bench.searched_layers import searched_layers
from lpq.cli.shapes import SHAPES, Transformer
from lpq.recipes.globs import exactly, matching, numberless
from lpq.registry.errors import ImportStringError, LpqError, OptionError, suggestion, words

Size = TypeVar("Size")
Chosen = Annotated[
    int | None,
    typer.Option(
        "--experts-per-token",
        min=1,
        help="To how many experts a token goes. Default: as Hugging Face's configuration says.",
    ),
]
NAMED = f"{', '.join(SHAPES)}; a folder or config.json of Hugging Face; or package.module:function that makes it."


class ModelError(LpqError):
    """A model cannot be made, for the reason in the message."""


def by_function(name: str, option: str) -> nn.Module:
    """The model that a function makes.

    Args:
        name: ``package.module:function``, which takes no arguments.
        option: The option or argument that named it, for messages.
    """
    try:
        make = registry.resolve(name)
    except ImportStringError as error:
        absent = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        remedy = "; give `python -m lpq` in the folder that has it, or name that folder in PYTHONPATH"
        is_first = absent == name.partition(":")[0].partition(".")[0]  # no part of a package, which was found
        raise OptionError(f"{option}: {error}{remedy if is_first else ''}") from error
    if not callable(make):
        raise OptionError(f"{option}: {name} is of type {type(make).__name__}, and no function that makes the model")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise OptionError(f"{option}: {name} cannot be called without arguments: {error}") from error
    try:
        model = make()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{option}: {name} raised {words(error)}; call it in Python to see the traceback") from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"{option}: {name} returns a {type(model).__name__}, and no torch.nn.Module")
    return model


def on_meta(source: str, option: str) -> nn.Module:
    """A model on the meta device: it has parameters, which take no memory."""
    if source in SHAPES:
        return Transformer(SHAPES[source])
    path = Path(source)
    if path.exists():
        return _of_config(path, option)
    with torch.device("meta"):
        if ":" in source:
            model = by_function(source, option)
            if any(map(is_lazy, model.parameters())):
                raise ModelError(f"{option}: {source} has lazy parameters, without sizes: make layers with their sizes")
            return model
    raise OptionError(
        f"{option}: {source!r} is no shape ({suggestion(source, SHAPES)}), no file or folder, and no "
        "package.module:function"
    )


def _of_config(path: Path, option: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"{option}: to read {path} lpq needs transformers: pip install transformers") from error
    folder = path.parent if path.is_file() else path
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        classes = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
        with torch.device("meta"):
            if classes and classes[0] is not None:
                return classes[0](config)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:  # of transformers, whose errors have no class in common
        raise ModelError(f"{option}: transformers cannot build the model of {path}: {words(error)}") from error


def convert(model: nn.Module, policy: str | dict[str, Any], option: str, world: int = 1) -> list[str]:
    """Convert a model that an option named, and return what ``lpq.convert`` warns of, as of layers that it does not
    reach. ``world``: the number of ranks."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            lpq.convert(model, policy, weights="high_precision" if world > 1 else None)
        except LpqError:
            raise
        except (TypeError, ValueError) as error:  # of a layer that cannot have the recipe
            raise ModelError(f"{option}: {error}") from error
    return [text for one in warned if (text := str(one.message)).startswith("lpq.")]


def layer_sizes(model: nn.Module, tokens: int, chosen: int | None) -> dict[str, tuple[LayerSize, ...]]:
    """The sizes of all layers that were converted, by name: one size of a linear layer, one for each stack of experts.
    Experts are taken to get equally many rows. They have no size where nobody says to how many of them a token goes.

    Args:
        model: The model, converted.
        tokens: The tokens of a step.
        chosen: To how many experts a token goes; None: as the model's configuration says.
    """
    asked_count, chosen = chosen, chosen or experts_per_token(model)
    sizes: dict[str, tuple[LayerSize, ...]] = {}
    for name, stacks in searched_layers(model).items():
        count = min((one.experts for one in stacks if one.experts is not None), default=None)
        if asked_count is not None and count is not None and asked_count > count:
            raise OptionError(f"--experts-per-token {asked_count}: {name} has {count} experts")
        rows = [one.experts if getattr(one.layer, "dense", False) else chosen for one in stacks]
        complete = all(one.experts is None or count for one, count in zip(stacks, rows, strict=True))
        own = (one.size(tokens, count or 0, 1) for one, count in zip(stacks, rows, strict=True))
        sizes[name] = tuple(own) if complete else ()
    if asked_count is not None and not any(isinstance(size, StackSize) for own in sizes.values() for size in own):
        raise OptionError(f"--experts-per-token {asked_count}: no experts of the model are layers of lpq; leave it out")
    return sizes


def left_out(sizes: Mapping[str, tuple[LayerSize, ...]]) -> str | None:
    """Say which experts have no size; None if all have one."""
    if not (names := [name for name, own in sizes.items() if not own]):
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"Experts are left out ({names[0]}{more}): --experts-per-token says to how many of them a token goes."


def experts_per_token(model: nn.Module) -> int | None:
    """To how many experts a token goes by the configuration of a model of Hugging Face's; None: it has none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_experts_per_tok", None)
    return count if isinstance(count, int) else None


class Alike(NamedTuple, Generic[Size]):
    """Layers that share a size and a name but for its numbers."""

    title: str
    """A pattern that matches these layers alone, or their names."""
    names: tuple[str, ...]
    size: Size


def alike(layers: Mapping[str, Size]) -> list[Alike[Size]]:
    """The layers in groups, by size and by name but for its numbers."""
    found: dict[tuple[str, Size], list[str]] = {}
    for name, size in layers.items():
        found.setdefault((numberless(name), size), []).append(name)
    return [
        Alike(", ".join(patterns(names, layers.keys() - names)), tuple(names), size)
        for (_, size), names in found.items()
    ]


def patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Patterns for a rule that match these layers and none of the others. A ``*`` stands for numbers, where it can."""
    short: dict[str, list[str]] = {}
    for name in names:
        short.setdefault(numberless(exactly(name)), []).append(name)
    taken = matching(short, [*others])
    every: list[str] = []
    for pattern, own in short.items():
        is_exact = len(own) > 1 and not taken[pattern]
        every += [pattern] if is_exact else map(exactly, own)
    return every
