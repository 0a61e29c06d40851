"""The hooks that lpq calls. A plugin implements any of them; each is called on the cold path only."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from lpq.registry.specs import FormatSpec, KernelSpec, LayoutSpec, RecipeSpec

PROJECT = "lpq"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lpq_register_formats() -> FormatSpec | Sequence[FormatSpec]:
    """Return the formats that this plugin brings."""


@hookspec
def lpq_register_recipes() -> RecipeSpec | Sequence[RecipeSpec]:
    """Return the named recipes that this plugin brings."""


@hookspec
def lpq_register_kernels() -> KernelSpec | Sequence[KernelSpec]:
    """Return kernels for formats of other plugins; ``KernelSpec.formats`` names them."""


@hookspec
def lpq_register_layouts() -> LayoutSpec | Sequence[LayoutSpec]:
    """Return the layouts of inference engines' files that this plugin brings."""


@hookspec(firstresult=True)
def lpq_convert_module(module: Any, fqn: str, recipe: Any) -> Any:
    """Return the low-precision form of ``module``, or None to leave it to the next plugin.

    The first result wins; lpq's own conversion of ``torch.nn.Linear`` comes last. Modules are exchanged once plugins
    were asked for all of them. Where one is refused, those that a layer's ``adopt`` took over are given back.
    A module with hooks that the returned one would not call is refused. The returned one gets the module's mode.

    Layers of lpq inside of what is returned that have this very recipe follow the rules that end at a step. Where there
    are none, the report notes that the module keeps its recipe. When the model is converted again, layers of lpq inside
    are given what the policy has for their own names.

    Args:
        module: A module of the model.
        fqn: Its dotted name in the model; empty for the model itself.
        recipe: The ``lpq.recipes.Recipe`` that the policy gives it.
    """
