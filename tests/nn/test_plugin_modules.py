"""Modules that a plugin converts follow the policy like lpq's own, as far as they can; what they cannot is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq import registry
from lpq.registry.errors import LpqError

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
    """A class that lpq does not serve."""


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


def test_layers_inside_follow_the_rules_that_end(plugin: Any) -> None:
    plugin(Layers)
    made = lpq.convert(model(), TWO, steps=20)
    assert titles(made) == ["nvfp4", "nvfp4", "bf16"], "what the plugin gave another recipe keeps it"
    assert (made[1].up.qualified_name, made[1].down.qualified_name) == ("1.up", "")
    lpq.set_step(made, 10)
    assert titles(made) == ["mxfp8", "mxfp8", "bf16"]
    assert torch.equal(copy.deepcopy(made)(X), made(X))
    assert [(e.name, e.note) for e in lpq.report(made).converted] == [
        ("0", "nvfp4 until step 10, then mxfp8"),
        ("1", "nvfp4 until step 10, then mxfp8; it is a test_plugin_modules.Layers now"),
    ]


def test_converted_again_layers_inside_get_what_is_said_of_their_names(plugin: Any) -> None:
    plugin(Layers)
    made = lpq.convert(model(), "mxfp8")
    lpq.convert(made, {"rules": [{"match": ["*.up"], "recipe": "nvfp4"}, {"match": ["0"], "recipe": "mxfp8"}]})
    assert titles(made) == ["mxfp8", "nvfp4", None]
    assert [e.name for e in lpq.report(made).converted] == ["0", "1.up"]
    lpq.convert(made, "fp8-current")
    assert titles(made) == ["fp8-current", "fp8-current", "fp8-current"]


def test_the_report_says_what_cannot_follow(plugin: Any) -> None:
    plugin(Opaque)
    made = lpq.convert(model(), TWO, steps=20)
    notes = {e.name: e.note for e in lpq.report(made).converted}
    assert notes["1"].startswith("nvfp4, and nothing later: there is no lpq.nn.Linear")
    lpq.convert(made, "mxfp8")
    report = lpq.report(made)
    assert [e.name for e in report.converted] == ["0"]
    assert [(e.name, e.note) for e in report.left] == [("1", "a plugin made it for nvfp4, and none converts it again")]


def test_a_plugin_may_change_the_whole_model_in_place() -> None:
    class Takes:
        @staticmethod
        @registry.hookimpl
        def lpq_convert_module(module: nn.Module, fqn: str) -> nn.Module | None:
            if fqn:
                return None
            del module[1]  # type: ignore[attr-defined]
            return module

    registry.register(Takes, name="takes")
    try:
        made = lpq.convert(model(), "mxfp8")
    finally:
        registry.refresh()
    assert [type(m) for m in made] == [nn.Linear]
    assert [e.name for e in lpq.report(made).converted] == [""]


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


class Raises:
    @registry.hookimpl
    def lpq_convert_module(self, module: nn.Module) -> None:
        if type(module) is Mlp:
            raise KeyError("key")


class ReturnsNone:
    @registry.hookimpl
    def lpq_convert_module(self, module: nn.Module) -> object:
        return 3 if type(module) is Mlp else None


class Clashes:
    """Makes layers that have the name of a buffer of another recipe."""

    @registry.hookimpl
    def lpq_convert_module(self, module: nn.Module, recipe: Any) -> nn.Module | None:
        if type(module) is not Mlp:
            return None
        made = Layers(module, recipe)
        made.up.x_amax_history = "mine"
        return made


@pytest.mark.parametrize("plugin", [Raises, ReturnsNone, Clashes])
def test_nothing_is_changed_where_a_plugin_fails_for_a_later_module(plugin: Any) -> None:
    rules = {"rules": [{"match": ["*"], "recipe": "mxfp8", "until": 10}, {"match": ["*"], "recipe": "fp8-delayed"}]}
    net = model()
    registry.register(plugin(), name="fails")
    try:
        with pytest.raises((LpqError, ValueError), match=r"KeyError: 'key'|returned 3|x_amax_history, and the layer"):
            lpq.convert(net, rules, steps=20)
    finally:
        registry.refresh()
    assert [type(module) for module in net] == [nn.Linear, Mlp]
    with pytest.raises(ValueError, match="was not converted"):
        lpq.report(net)
    lpq.convert(net, "mxfp8")


def test_a_warning_that_is_an_error_leaves_a_converted_model() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    rules = {"rules": [{"match": ["0"], "recipe": "mxfp8"}, {"match": ["absent"], "recipe": "nvfp4"}]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no layer matches 'absent'"):
            lpq.convert(net, rules)
    assert [entry.name for entry in lpq.report(net).converted] == ["0"]


def test_the_report_has_the_recipes_that_layers_have() -> None:
    net = lpq.convert(nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64)), "mxfp8")
    lpq.convert(net[0], "nvfp4")
    assert [(e.name, e.note) for e in lpq.report(net).converted] == [("0.0", "nvfp4"), ("1", "mxfp8")]


def test_the_former_name_of_a_name_warns() -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    with pytest.warns(DeprecationWarning, match=r"layer\.qualified_name"):
        assert model[0].place == model[0].qualified_name == "0"
