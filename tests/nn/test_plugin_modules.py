"""Modules that a plugin converts follow the policy like lpq's own, as far as they can; what they cannot is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq import registry
from lpq.registry import registry as lookup
from lpq.registry.errors import LpqError, PluginError

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


class Converts:
    """A plugin that converts as this function says, which is given the module, its name and the recipe."""

    def __init__(self, convert: Callable[[Any, str, Any], object]) -> None:
        self.convert = convert

    @registry.hookimpl
    def lpq_convert_module(self, module: Any, fqn: str, recipe: Any) -> object:
        return self.convert(module, fqn, recipe)


Plugin = Callable[[Callable[[Any, str, Any], object]], None]


@pytest.fixture
def plugin(register: Callable[..., object]) -> Plugin:
    return lambda convert: register(Converts(convert), name="acme")


def made_layers(module: Any, fqn: str, recipe: Any) -> nn.Module | None:
    return Layers(module, recipe) if type(module) is Mlp else None


def clashes(module: Any, fqn: str, recipe: Any) -> nn.Module | None:
    """Make layers that have the name of a buffer of another recipe."""
    made = made_layers(module, fqn, recipe)
    if made is not None:
        made.up.x_amax_history = "mine"
    return made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Mlp())


def titles(model: Any) -> list[str | None]:
    return [m.recipe and m.recipe.title for m in (model[0], model[1].up, model[1].down)]


def test_layers_inside_follow_the_rules_that_end(plugin: Plugin) -> None:
    plugin(made_layers)
    made = lpq.convert(model(), TWO, steps=20)
    assert titles(made) == ["nvfp4", "nvfp4", "bf16"], "what the plugin gave another recipe keeps it"
    assert (made[1].up.qualified_name, made[1].down.qualified_name) == ("1.up", "")
    lpq.set_step(made, 10)
    assert titles(made) == ["mxfp8", "mxfp8", "bf16"]
    assert torch.equal(copy.deepcopy(made)(X), made(X))
    assert [(e.name, e.note) for e in lpq.report(made).converted] == [
        ("0", "nvfp4 until step 10, then mxfp8; now: mxfp8"),
        ("1", "nvfp4 until step 10, then mxfp8; now: mxfp8; it is a test_plugin_modules.Layers now"),
    ]


def test_converted_again_layers_inside_get_what_is_said_of_their_names(plugin: Plugin) -> None:
    plugin(made_layers)
    made = lpq.convert(model(), "mxfp8")
    lpq.convert(made, {"rules": [{"match": ["*.up"], "recipe": "nvfp4"}, {"match": ["0"], "recipe": "mxfp8"}]})
    assert titles(made) == ["mxfp8", "nvfp4", None]
    assert [e.name for e in lpq.report(made).converted] == ["0", "1.up"]
    lpq.convert(made, "fp8-current")
    assert titles(made) == ["fp8-current", "fp8-current", "fp8-current"]


def test_the_report_says_what_cannot_follow(plugin: Plugin) -> None:
    plugin(lambda module, *_: Opaque() if type(module) is Mlp else None)
    made = lpq.convert(model(), TWO, steps=20)
    notes = {e.name: e.note for e in lpq.report(made).converted}
    assert notes["1"].startswith("nvfp4, and nothing later: there is no lpq.nn.Linear")
    lpq.convert(made, "mxfp8")
    report = lpq.report(made)
    assert [e.name for e in report.converted] == ["0"]
    assert [(e.name, e.note) for e in report.left] == [("1", "a plugin made it for nvfp4, and none converts it again")]


def without_the_second(module: Any, fqn: str, recipe: Any) -> object:
    if not fqn:
        del module[1]
    return None if fqn else module


TAKES: dict[str, tuple[Any, list[type[nn.Module]], list[str]]] = {
    "the whole model, in place": (without_the_second, [nn.Linear], [""]),
    "a linear as it is": (lambda module, fqn, _: module if fqn == "0" else None, [nn.Linear, Mlp], ["0"]),
    "another module": (lambda module, fqn, _: nn.Tanh() if fqn == "1" else None, [lpq.nn.Linear, nn.Tanh], ["0", "1"]),
    "nothing": (lambda *_: None, [lpq.nn.Linear, Mlp], ["0"]),
}


@pytest.mark.parametrize("what", TAKES)
def test_a_plugin_may_take(what: str, plugin: Plugin) -> None:
    convert, types, names = TAKES[what]
    plugin(convert)
    made = lpq.convert(model(), "mxfp8")
    assert [type(m) for m in made] == types
    assert [e.name for e in lpq.report(made).converted] == names


@pytest.mark.parametrize("hang", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_a_module_in_whose_place_another_comes_are_not_lost(hang: str, plugin: Plugin) -> None:
    net, called = model(), []
    handle = getattr(net[1], hang)(lambda *_: called.append(1))
    plugin(made_layers)
    with pytest.raises(ValueError, match=r"^1: a plugin replaces it and its hooks: add them after lpq\.convert"):
        lpq.convert(net, "mxfp8")
    assert [type(module) for module in net] == [nn.Linear, Mlp]
    plugin(lambda module, *_: nn.Sequential(module) if type(module) is Mlp else None)
    lpq.convert(net, "mxfp8")(X).sum().backward()
    assert called == [1], "it is in what the plugin made"
    handle.remove()


def test_a_module_of_a_plugin_is_in_the_mode_of_the_one_before(plugin: Plugin) -> None:
    plugin(made_layers)
    for mode in (False, True):
        assert {m.training for m in lpq.convert(model().train(mode), "mxfp8").modules()} == {mode}


FAILS: list[tuple[Any, str]] = [
    (lambda module, *_: {}["key"] if type(module) is Mlp else None, "KeyError: 'key'"),
    (
        lambda module, *_: 3 if type(module) is Mlp else None,
        r"returned 3 for 1 \(Mlp\), and that is no torch.nn.Module",
    ),
    (clashes, "x_amax_history, and the layer"),
]


@pytest.mark.parametrize(("convert", "words"), FAILS, ids=["raises", "returns 3", "clashes"])
def test_nothing_is_changed_where_a_plugin_fails_for_a_later_module(convert: Any, words: str, plugin: Plugin) -> None:
    rules = {"rules": [{"match": ["*"], "recipe": "mxfp8", "until": 10}, {"match": ["*"], "recipe": "fp8-delayed"}]}
    net = model()
    plugin(convert)
    with pytest.raises((LpqError, ValueError), match=words):
        lpq.convert(net, rules, steps=20)
    registry.refresh()
    assert [type(module) for module in net] == [nn.Linear, Mlp]
    with pytest.raises(ValueError, match="was not converted"):
        lpq.report(net)
    lpq.convert(net, "mxfp8")


class Own(lpq.nn.Linear):
    """A layer of a plugin."""


def adopts(module: Any, fqn: str, recipe: Any) -> nn.Module | None:
    return Own.adopt(module, recipe) if type(module) is nn.Linear else None


def fails(module: Any, fqn: str, recipe: Any) -> object:
    return {}["key"] if type(module) is Mlp else None


@pytest.mark.parametrize(("second", "words"), [(fails, "KeyError"), (clashes, "x_amax_history")])
def test_a_module_that_a_plugin_adopted_is_given_back(second: Any, words: str, plugin: Plugin) -> None:
    net, called = model(), []
    hook = net[0].register_forward_hook(lambda *_: called.append(1))
    keys = {*vars(net[0])}
    plugin(lambda *args: adopts(*args) or second(*args))
    rules = [{"match": "0", "recipe": "fp8-delayed"}, *TWO["rules"][:1], {"match": "*", "recipe": "fp8-delayed"}]
    with pytest.raises((LpqError, ValueError), match=words):
        lpq.convert(net, {"rules": rules}, steps=20)
    assert [type(module) for module in net] == [nn.Linear, Mlp]
    assert ({*vars(net[0])}, [*net[0].named_buffers()]) == (keys, [])
    net(X)
    hook.remove()
    net(X)
    assert called == [1], "a handle finds its hook"
    registry.refresh()
    assert [entry.name for entry in lpq.report(lpq.convert(net, "mxfp8")).converted] == ["0"]


def test_a_class_is_a_plugin_if_its_hooks_are_static(register: Callable[..., object]) -> None:
    class Heir(Converts): ...

    class Static:
        @staticmethod
        @registry.hookimpl
        def lpq_convert_module(module: nn.Module) -> None: ...

    for cls in (Converts, Heir):
        remedy = rf"hooks take self. Remedy: register an object of it, as {cls.__name__}\(\)"
        with pytest.raises(PluginError, match=remedy):
            register(cls, name="odd")
    assert "odd" not in {plugin.name for plugin in registry.plugins()}
    register(Static, name="static")
    register(Converts(lambda *_: None), name="odd")


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


def test_a_walk_through_all_attributes_warns_of_no_former_name() -> None:
    """As torch.jit.trace makes one."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {name for name in dir(model[0]) if hasattr(model[0], name)} >= {"qualified_name", "recipe", "weight"}


def test_a_conversion_looks_for_new_plugins_as_often_whatever_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look asks for the time of each folder of the search path: on a disk of a network these may be slow."""
    looked: list[int] = []
    places = lookup._places
    monkeypatch.setattr(lookup, "_places", lambda: looked.append(len(found)) or places())
    found: list[int] = []
    for layers in (2, 20):
        lpq.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers))), "mxfp8")
        found.append(len(looked) - sum(found))
    assert found[1] <= found[0]
    assert found[1] > 0
