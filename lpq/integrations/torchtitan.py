"""An override for torchtitan, which imports this module when a configuration names the override ``linear``.

It has torchtitan build each linear layer of the model's blocks with a recipe. Parameters, their initialization, their
sharding and their names stay torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear

import lpq
from lpq import registry

__all__ = ["LpqLinear", "linear"]

NAME = "torchtitan"


class LpqLinear(lpq.nn.Linear, Linear):  # type: ignore[misc]
    """torchtitan's linear layer with a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """torchtitan's configuration of the layer, the recipe, and ``weights=`` of ``lpq.convert``."""

        recipe: str
        weights: str | None = None

        def build(self, **runtime: Any) -> nn.Module:
            layer: nn.Module = derive(self, Linear.Config).build(**runtime)
            return lpq.convert(layer, self.recipe, weights=cast(Any, self.weights))


class TitanLayers:
    """The plugin that lets ``lpq.convert`` convert torchtitan's class, and none of its subclasses."""

    @registry.hookimpl
    def lpq_convert_module(self, module: Any, fqn: str, recipe: Any) -> nn.Module | None:
        return LpqLinear.adopt(module, recipe) if type(module) is Linear else None


@override(target=Linear.Config, fqns=["*layers.*"], exact=True, description="linear layers in low precision, by lpq")  # type: ignore[untyped-decorator]
def linear(cfg: Any, *, recipe: str, weights: str | None = None) -> Any:
    """The override of each linear layer in a block."""
    if all(plugin.name != NAME for plugin in registry.plugins()):
        registry.register(TitanLayers(), name=NAME)
    return derive(cfg, LpqLinear.Config, recipe=recipe, weights=weights)
