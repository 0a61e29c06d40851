"""Modules that a plugin converts follow the policy like lpq's own, as far as they can; what they cannot is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq import registry
from lpq.recipes import RecipeError
from lpq.registry.errors import PluginError

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
TWO = {"rules": [{"match": ["*"], "recipe": "nvfp4", "until": 10}, {"match": ["*"], "recipe": "mxfp8"}]}


class Mlp(nn.Module):
    """Which holds its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(64, 128))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up.t() @ self.down.t()


class Layers(nn.Module):
    """The same by layers of lpq, of which one has a recipe of its own."""

    def __init__(self, mlp: Mlp, recipe: Any) -> None:
        super().__init__()
        self.up, self.down = lpq.nn.Linear(64, 128, False, recipe=recipe), lpq.nn.Linear(128, 64, False, recipe="bf16")
        self.up.weight, self.down.weight = mlp.up, mlp.down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Opaque(Mlp):
    """Of which lpq knows nothing."""


class Plugin:
    """Makes one of the two of each ``Mlp``."""

    def __init__(self, makes: type[nn.Module]) -> None:
        self.makes = makes

    @registry.hookimpl
    def lpq_convert_module(self, module: nn.Module, recipe: Any) -> nn.Module | None:
        if type(module) is not Mlp:
            return None
        return Layers(module, recipe) if self.makes is Layers else self.makes()


@pytest.fixture
def plugin() -> Iterator[Any]:
    yield lambda makes: registry.register(Plugin(makes), name="mlp")
    registry.refresh()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Mlp())


def titles(model: Any) -> list[str | None]:
    return [m.recipe and m.recipe.title for m in (model[0], model[1].up, model[1].down)]


def test_layers_inside_follow_the_policy(plugin: Any) -> None:
    plugin(Layers)
    made = lpq.convert(model(), TWO, steps=20)
    assert titles(made) == ["nvfp4", "nvfp4", "bf16"], "what the plugin gave another recipe keeps it"
    assert (made[1].up.place, made[1].down.place) == ("1.up", "")
    lpq.set_step(made, 10)
    assert titles(made) == ["mxfp8", "mxfp8", "bf16"]
    expected = made(X)
    assert torch.equal(copy.deepcopy(made)(X), expected)
    lpq.convert(made, "fp8-current")
    assert titles(made) == ["fp8-current", "fp8-current", "bf16"]
    assert [e.name for e in lpq.report(made).converted] == ["0", "1"]
    lpq.convert(made, {"rules": [{"match": ["0"], "recipe": "mxfp8"}]})
    assert titles(made) == ["mxfp8", None, None]
    assert [e.name for e in lpq.report(made).left] == ["1.up", "1.down"]


def test_layers_that_the_policy_names_inside_get_that(plugin: Any) -> None:
    plugin(Layers)
    made = lpq.convert(model(), "mxfp8")
    lpq.convert(made, {"rules": [{"match": ["*.down"], "recipe": "nvfp4"}, {"match": ["0"], "recipe": "mxfp8"}]})
    assert titles(made) == ["mxfp8", None, "nvfp4"]


def test_what_cannot_follow_is_refused_before_anything_is_changed(plugin: Any) -> None:
    plugin(Opaque)
    fresh = model()
    with pytest.raises(RecipeError, match=r"1 \(Mlp\): the policy gives it several recipes, nvfp4 until step 10, then"):
        lpq.convert(fresh, TWO, steps=20)
    assert [type(m) for m in fresh] == [nn.Linear, Mlp]
    made = lpq.convert(fresh, "nvfp4")
    assert isinstance(made[1], Opaque)
    opaque = made[1]
    lpq.convert(made, "nvfp4")
    assert made[1] is opaque
    assert [e.name for e in lpq.report(made).converted] == ["0", "1"]
    with pytest.raises(
        RecipeError, match=r"1 \(Opaque\) was made by a plugin for the recipe nvfp4. .* mxfp8, and no pl"
    ):
        lpq.convert(made, "mxfp8")
    assert made[0].recipe.title == "nvfp4"


def test_a_hook_that_raises_changes_nothing(plugin: Any) -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            raise KeyError("weight")

    plugin(Raises)
    fresh = model()
    with pytest.raises(PluginError, match="raised KeyError"):
        lpq.convert(fresh, "mxfp8")
    assert [type(m) for m in fresh] == [nn.Linear, Mlp]


def test_a_plugin_may_keep_a_linear_as_it_is() -> None:
    class Keeps:
        @staticmethod
        @registry.hookimpl
        def lpq_convert_module(module: nn.Module, fqn: str) -> nn.Module | None:
            return module if fqn == "0" else None

    registry.register(Keeps, name="keeps")
    try:
        made = lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp8")
    finally:
        registry.refresh()
    assert [type(m) for m in made] == [nn.Linear, lpq.nn.Linear]
