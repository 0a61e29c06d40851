"""The functions of the registry: which plugin owns a name, and what the name stands for.

The entry-point name owns its namespace, and the longest that fits a name comes first, so a lookup imports one plugin.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal

from lpq.registry import plugin_faults
from lpq.registry.errors import PluginError, words
from lpq.registry.layouts import Layout, Scheme
from lpq.registry.loader import PluginInfo
from lpq.registry.registry import cached, default
from lpq.registry.specs import FormatSpec, KernelSpec, LayoutSpec, RecipeSpec


def plugins() -> tuple[PluginInfo, ...]:
    """All plugins, lpq's own first; those that cannot be used carry their error."""
    return default().plugins()


def formats() -> dict[str, FormatSpec]:
    """All formats that can be used, by name."""
    return _usable("formats")


def format(name: str) -> FormatSpec:
    """The format with this ``name``. Raises ``UnknownFormat`` or, if its plugin is broken, ``PluginError``."""
    return default().provider(name, "formats").formats[name]


def recipes() -> dict[str, RecipeSpec]:
    """All named recipes that plugins bring, by name."""
    return _usable("recipes")


def _usable(kind: Literal["formats", "recipes"]) -> dict[str, Any]:
    registry = default()
    with registry.lock:
        names = [name for plugin in registry.plugins() for name in getattr(plugin, kind)]
        return {name: getattr(registry.provider(name, kind), kind)[name] for name in names}


def recipe_spec(name: str) -> RecipeSpec:
    """The recipe with this ``name``. Raises ``UnknownRecipe`` or, if its plugin is broken, ``PluginError``."""
    return default().provider(name, "recipes").recipes[name]


def recipe_known_as(alias: str) -> RecipeSpec | None:
    """The recipe that other libraries call ``alias``; None if no plugin lists that name."""
    every = (spec for plugin in plugins() for spec in plugin.recipes.values())
    return next((spec for spec in every if alias.lower() in map(str.lower, spec.aliases)), None)


def layouts() -> dict[str, LayoutSpec]:
    """All layouts of engines' files that plugins bring, by name."""
    return {name: spec for plugin in plugins() for name, spec in plugin.layouts.items()}


@cached
def layout(name: str) -> Layout:
    """The layout with this ``name``, which a plugin brings."""
    registry = default()
    plugin = next(plugin for plugin in registry.plugins() if name in plugin.layouts)
    string = plugin.layouts[name].layout
    cls = registry.imported(plugin, string)
    if not (isinstance(cls, type) and issubclass(cls, Layout)):
        cause = f"layout {name} has layout={string!r}, which is no subclass of lpq.registry.Layout but {cls!r}"
        raise _at_fault(plugin, cause, "name the class of the layout")
    return cls()


@cached
def schemes(format: str) -> tuple[Scheme, ...]:
    """How operands of the format ``format`` lie in the files of inference engines, in any layout."""
    registry = default()
    plugin = registry.provider(format, "formats")
    string = plugin.formats[format].schemes
    if string is None:
        return ()
    own = registry.imported(plugin, string)
    if not isinstance(own, tuple) or not all(isinstance(scheme, Scheme) for scheme in own):
        cause = f"format {format} has schemes={string!r}, which is no tuple of Scheme but {own!r}"
        raise _at_fault(plugin, cause, "write a tuple of lpq.registry.Scheme")
    if (wrong := plugin_faults.fault(own)) is not None:
        raise _at_fault(plugin, *wrong)
    return own


@cached
def kernels(op: str, formats: tuple[str, ...]) -> tuple[KernelSpec, ...]:
    """The kernels of all usable plugins for this operation on exactly these formats, the preferred first.

    Args:
        op: The operation, one of ``OPERATIONS``.
        formats: The names of formats, in the order of operands, as ``KernelSpec.formats`` has them.
    """
    fitting = [k for p in plugins() for k in p.kernels if k.op == op and tuple(k.formats) == formats]
    return tuple(sorted(fitting, key=lambda kernel: -kernel.priority))


def provider_of(kernel: KernelSpec) -> PluginInfo | None:
    """The plugin that brought this very ``kernel``; None for one that no plugin returned."""
    return next((p for p in plugins() if any(k is kernel for k in p.kernels)), None)


def at_fault(name: str, cause: str, remedy: str) -> PluginError:
    """The error of the plugin that brings this format, for a mistake of its that shows when the format is used.

    Args:
        name: The name of the format.
        cause: The mistake in words, with the place where it is.
        remedy: The change that its authors are to make, as an imperative.
    """
    return _at_fault(plugin_of(name), cause, remedy)


def plugin_of(name: str) -> PluginInfo:
    """The plugin that brings the format ``name``."""
    return default().provider(name, "formats")


def _at_fault(plugin: PluginInfo, cause: str, remedy: str) -> PluginError:
    return PluginError(plugin.name, plugin.distribution, plugin.version, cause, remedy)


def quantizer_class(name: str) -> Any:
    """The quantizer class of the format ``name``, imported."""
    plugin, string, cls = _class(name, "quantizer")
    if not (hasattr(cls, "from_options") and is_dataclass(cls)):
        cause = f"format {name} has quantizer={string!r}, which is no dataclass with from_options"
        raise _at_fault(plugin, cause, "name a subclass of lpq.core.Quantizer that is a frozen dataclass")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # a constant that has a hash
        cause = f"format {name} has quantizer={string!r}, which is a dataclass that is not frozen"
        raise _at_fault(plugin, cause, f"declare {cls.__qualname__} with @dataclass(frozen=True)")
    if (fault := _equality_fault(cls)) is not None:
        cause = f"a quantizer of format {name}, {cls.__qualname__}, {fault}"
        remedy = "let the dataclass make __eq__ and __hash__ of all options, without eq=False and field(compare=False)"
        raise _at_fault(plugin, cause, remedy)
    return cls


@cached
def _equality_fault(cls: type) -> str | None:
    """The mistake in ``==`` or ``hash`` of a quantizer class; None if they compare and hash the options, as plans,
    compiled graphs and kernels are kept for equal quantizers. It is tried with quantizers whose options are bare
    objects, which support ``==`` and ``hash`` alone.
    """
    same = {field.name: object() for field in fields(cls)}
    try:
        one, other = _with_options(cls, same), _with_options(cls, same)
        if one != other or hash(one) != hash(other):
            return "is not equal to a copy of itself"
        for name in same:
            if _with_options(cls, same) == _with_options(cls, same | {name: object()}):
                return f"is equal to one with another {name}"
    except Exception as error:
        return f"compares by more than its options: == raised {words(error)}"
    return None


def _with_options(cls: type, options: dict[str, object]) -> Any:
    """A quantizer with these options, which are not checked."""
    quantizer: Any = object.__new__(cls)
    for name, value in options.items():
        object.__setattr__(quantizer, name, value)
    return quantizer


def storage_class(name: str) -> Any:
    """The storage class of the format ``name``, imported."""
    return _class(name, "storage")[2]


def _class(name: str, role: Literal["quantizer", "storage"]) -> tuple[PluginInfo, str, type]:
    """A class of a format, the plugin that brings it and its import string."""
    registry = default()
    plugin = registry.provider(name, "formats")
    string = getattr(plugin.formats[name], role)
    cls = registry.imported(plugin, string)
    if not isinstance(cls, type):
        cause = f"format {name} has {role}={string!r}, which is no class but {cls!r}"
        raise _at_fault(plugin, cause, f"name the {role} class of the format")
    return plugin, string, cls


def convert_module(module: Any, fqn: str, recipe: Any) -> Any:
    """Return the module that the first plugin whose ``lpq_convert_module`` converts it makes; None: none does.

    Args:
        module: A module of a model.
        fqn: Its dotted name in the model.
        recipe: The recipe that it gets.
    """
    return default().convert_module(module, fqn, recipe)


def register(plugin: object, *, name: str) -> PluginInfo:
    """Take a module, or any object with hooks, as the plugin ``name``, without packaging it.

    In a notebook the import strings of its specs begin with ``__main__:``. Registering a name again replaces
    the earlier one, and ``refresh`` forgets it.

    Args:
        plugin: A module, or an object whose methods are hooks; no class whose hooks take ``self``.
        name: Its name, in whose namespace its formats and recipes lie.
    """
    return default().register(plugin, name)
