"""The registry: which formats, recipes and kernels there are, who brings them, and how they are named.

Plugins are found in the metadata of installed distributions (entry-point group ``lpq.plugins``) and imported only when
one of their names is looked up. Nothing here imports torch.
"""

from __future__ import annotations

from lpq.registry.errors import LayoutError, LpqError, PluginError
from lpq.registry.field_docs import describe_fields
from lpq.registry.grammar import split_items
from lpq.registry.hookspecs import hookimpl
from lpq.registry.layouts import Described, Group, Inputs, Layout, Part, Scheme, decoded_in_bf16
from lpq.registry.loader import PluginInfo, resolve
from lpq.registry.lookup import (
    at_fault,
    convert_module,
    format,
    formats,
    kernels,
    layout,
    layouts,
    plugin_of,
    plugins,
    provider_of,
    quantizer_class,
    recipe_known_as,
    recipe_spec,
    recipes,
    register,
    schemes,
    storage_class,
)
from lpq.registry.quantizers import format_of, quantizer, spec_string
from lpq.registry.registry import cached, cached_few, epoch, refresh
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
    "decoded_in_bf16",
    "epoch",
    "format",
    "format_of",
    "formats",
    "hookimpl",
    "kernels",
    "layout",
    "layouts",
    "plugin_of",
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

describe_fields([*globals().values()])
