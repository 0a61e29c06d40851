"""The registry: which formats, recipes and kernels there are, who brings them, and how they are named.

Plugins are found in the metadata of installed distributions (entry-point group ``lpq.plugins``) and imported
only when something of theirs is looked up. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

from lpq.registry.errors import LayoutError, LpqError, PluginError
from lpq.registry.grammar import split_items
from lpq.registry.hookspecs import hookimpl
from lpq.registry.layouts import Described, Group, Inputs, Layout, Part, Scheme
from lpq.registry.loader import PluginInfo, resolve
from lpq.registry.lookup import cached, cached_few, default, epoch, refresh
from lpq.registry.quantizers import format_of, quantizer, spec_string
from lpq.registry.specs import ANY, API_VERSION, BACKENDS, OPERATIONS, FormatSpec, KernelSpec, LayoutSpec, RecipeSpec

__all__ = [
    "ANY",
    "API_VERSION",
    "BACKENDS",
    "OPERATIONS",
    "Described",
    "FormatSpec",
    "Group",
    "Inputs",
    "KernelSpec",
    "Layout",
    "LayoutError",
    "LayoutSpec",
    "LpqError",
    "Part",
    "PluginError",
    "PluginInfo",
    "RecipeSpec",
    "Scheme",
    "at_fault",
    "cached",
    "cached_few",
    "convert_module",
    "epoch",
    "format",
    "format_of",
    "formats",
    "hookimpl",
    "kernels",
    "layout",
    "layouts",
    "plugins",
    "provider_of",
    "quantizer",
    "quantizer_class",
    "recipe_known_as",
    "recipe_spec",
    "recipes",
    "refresh",
    "register",
    "resolve",
    "schemes",
    "spec_string",
    "split_items",
    "storage_class",
]


def plugins() -> tuple[PluginInfo, ...]:
    """All plugins, lpq's own first; those that cannot be used carry their error."""
    return default().plugins()


def formats() -> dict[str, FormatSpec]:
    """All formats that can be used, by name."""
    return default().formats()


def format(name: str) -> FormatSpec:
    """The format of this name. Raises ``UnknownFormat`` or, if its plugin is broken, ``PluginError``."""
    return default().format(name)


def recipes() -> dict[str, RecipeSpec]:
    """All named recipes that plugins bring, by name."""
    return default().recipes()


def recipe_spec(name: str) -> RecipeSpec:
    """The recipe of this name. Raises ``UnknownRecipe`` or, if its plugin is broken, ``PluginError``."""
    return default().recipe(name)


def recipe_known_as(alias: str) -> RecipeSpec | None:
    """The recipe that other libraries call so; None if no plugin lists that name."""
    return default().recipe_known_as(alias)


def layouts() -> dict[str, LayoutSpec]:
    """All layouts of engines' files that plugins bring, by name."""
    return default().layouts()


@cached
def layout(name: str) -> Layout:
    """The layout of this name, which a plugin brings."""
    made: Layout = default().load_layout(name)
    return made


@cached
def schemes(format: str) -> tuple[Scheme, ...]:
    """How operands of a format lie in the files of inference engines, in any layout."""
    return default().schemes(format)


@cached
def kernels(op: str, formats: tuple[str, ...]) -> tuple[KernelSpec, ...]:
    """The kernels of all usable plugins for this operation on exactly these formats, the preferred first."""
    return default().kernels(op, formats)


def provider_of(kernel: KernelSpec) -> PluginInfo | None:
    """The plugin that brought this very kernel; None for one that no plugin returned."""
    return default().provider_of(kernel)


def at_fault(name: str, cause: str, remedy: str) -> PluginError:
    """The error of the plugin that brings this format, for a mistake of its that shows when the format is used."""
    return default().at_fault(name, cause, remedy)


def quantizer_class(name: str) -> Any:
    """The quantizer class of a format, imported."""
    return default().load_class(name, "quantizer")


def storage_class(name: str) -> Any:
    """The storage class of a format, imported."""
    return default().load_class(name, "storage")


def convert_module(module: Any, fqn: str, recipe: Any, *, own: object) -> Any:
    """Call ``lpq_convert_module`` of all usable plugins and of ``own``, which holds lpq's implementation."""
    return default().convert_module(module, fqn, recipe, own=own)


def register(plugin: object, *, name: str) -> PluginInfo:
    """Take a module, or any object with hooks, as the plugin ``name``, without packaging it.

    In a notebook the import strings of its specs begin with ``__main__:``. Registering a name again replaces
    the earlier one, and ``refresh`` forgets it.
    """
    return default().register(plugin, name)
