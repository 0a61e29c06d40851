"""Names that people bring along: other libraries' are understood and answered, a format's is told from a recipe's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import lpq
from lpq.recipes import RecipeWarning
from lpq.registry import RecipeSpec, hookimpl
from lpq.registry.errors import PluginError

KNOWN = {
    "tensorwise": "fp8-current", "Float8CurrentScaling": "fp8-current", "rowwise": "fp8-row",
    "rowwise_with_gw_hp": "fp8-row-bf16-wgrad", "blockwise": "fp8-block", "DelayedScaling": "fp8-delayed",
    "delayedscaling": "fp8-delayed", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4",
}  # fmt: skip


@pytest.fixture
def plugin(register: Callable[..., object]) -> Callable[..., None]:
    """Register a plugin ``acme`` with one recipe."""

    class Plugin:
        @hookimpl
        def lpq_register_recipes(self) -> RecipeSpec:
            return self.spec

    def make(recipe: str = "mxfp8", **more: Any) -> None:
        Plugin.spec = RecipeSpec(name="acme", summary="", recipe=recipe, **more)
        register(Plugin(), name="acme")

    return make


@pytest.mark.parametrize(("elsewhere", "here"), KNOWN.items())
def test_what_other_libraries_call_a_recipe_is_understood_and_answered(elsewhere: str, here: str) -> None:
    with pytest.warns(RecipeWarning, match=f"'{elsewhere}' is what other .*: lpq takes its recipe '{here}'") as told:
        made = lpq.recipe(elsewhere)
    assert len(told) == 1
    assert made == lpq.recipe(here)
    assert made.title == here
    with pytest.warns(RecipeWarning, match=f"'{here}'"):
        mixed = lpq.recipe(f"fprop=mxfp8, dgrad={elsewhere}, wgrad={elsewhere}")
    assert mixed.dgrad == made.dgrad
    with pytest.warns(RecipeWarning, match=f"'{here}'"):
        assert lpq.policy({"rules": [{"match": "*", "recipe": elsewhere}]}).rules[0].recipe == made


def test_the_gradient_of_the_weight_may_be_in_high_precision() -> None:
    made = lpq.recipe("fp8-row-bf16-wgrad")
    assert made.wgrad == lpq.recipe("bf16").wgrad
    assert (made.fprop, made.dgrad) == (lpq.recipe("fp8-row").fprop, lpq.recipe("fp8-row").dgrad)


def test_lpq_has_the_first_word_and_a_name_of_ones_own_the_last(plugin: Any) -> None:
    plugin(aliases=("tensorwise", "AcmeScaling"))
    with pytest.warns(RecipeWarning, match="'fp8-current'"):
        assert lpq.recipe("tensorwise").title == "fp8-current"
    with pytest.warns(RecipeWarning, match="lpq takes its recipe 'acme'"):
        assert lpq.recipe("AcmeScaling").title == "acme"


@pytest.mark.parametrize("aliases", ["tensorwise", (3,), ("two words",)])
def test_an_alias_is_a_name(aliases: Any, plugin: Any) -> None:
    with pytest.raises(PluginError, match="write a tuple of names, as"):
        plugin(aliases=aliases)


def test_a_format_is_told_from_its_recipes() -> None:
    words = r"'fp8' is a format and no recipe: .* fp8\(\) with .* plugin: fp8-current, fp8-delayed, .* write fp8\(\)"
    with pytest.warns(RecipeWarning, match=words):
        bare = lpq.recipe("fp8")
    with pytest.warns(RecipeWarning, match=words):
        assert lpq.recipe("x=fp8, w=mxfp8, dy=mxfp8").x == bare.x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lpq.recipe("fp8()") == bare
        assert lpq.recipe(bare.text) == bare
        lpq.recipe("mxfp8")  # a recipe and a format
        lpq.recipe("identity")  # a format without recipes


def test_a_plugin_that_means_its_format_is_not_corrected(plugin: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin("fp8")
        assert lpq.recipe("acme") == lpq.recipe("fp8()")
