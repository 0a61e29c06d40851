"""Recipes that plugins bring, and names that people bring along: other libraries' are understood and answered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from support.plugins import Install

import lpq
from lpq import registry
from lpq.recipes import PluginRecipeError, RecipeError, RecipeWarning
from lpq.registry import RecipeSpec, hookimpl
from lpq.registry.errors import PluginError


def recipes(**specs: object) -> str:
    """The source of a plugin with these recipes; a double underscore in a name is a dash."""
    made = [f"RecipeSpec(name={n.replace('__', '-')!r}, summary='', recipe={r!r})" for n, r in specs.items()]
    return (
        "from lpq.registry import RecipeSpec, hookimpl\n\n"
        f"@hookimpl\ndef lpq_register_recipes():\n    return [{', '.join(made)}]\n"
    )


def test_a_plugins_recipes_appear_beside_lpqs_own(install: Install) -> None:
    install(
        "acme",
        "1.2",
        recipes(acme="fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", acme__all={"x": "acme", "w": "acme", "dy": "mxfp8"}),
    )
    acme = lpq.recipe("acme")
    assert acme == lpq.recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
    assert acme.name == acme.title == "acme"
    assert lpq.recipe("acme-all").wgrad.b == acme.wgrad.b
    assert lpq.recipe("fprop=acme, dgrad=acme, wgrad=mxfp8").dgrad == acme.dgrad
    assert {"acme", "acme-all", "mxfp8", "nvfp4"} <= set(registry.recipes())
    with pytest.raises(LookupError, match="did you mean 'acme-all'"):
        lpq.recipe("acme-al")


def test_a_recipe_registered_in_the_process(register: Callable[..., object]) -> None:
    class Plugin:
        @hookimpl
        def lpq_register_recipes(self) -> RecipeSpec:
            return RecipeSpec(name="mine", summary="", recipe={"x": "mxfp8", "w": "mxfp8", "dy": "bf16"})

    register(Plugin(), name="mine")
    assert lpq.recipe("mine").dy == lpq.recipe("bf16").dy
    assert lpq.policy("mine").rules[0].recipe.name == "mine"
    registry.refresh()
    with pytest.raises(LookupError):
        lpq.recipe("mine")


def test_a_recipe_of_an_unknown_format_is_told_by_plugin_and_name(install: Install) -> None:
    install("acme", "1.2", recipes(acme="fprop=mxfp8, dgrad=int7, wgrad=bf16", acme__good="mxfp8"))
    words = r"(?s)recipe acme of plugin acme \(lpq-acme 1\.2\) cannot be built.*dgrad: .*'int7'.*Remedy: "
    with pytest.raises(PluginRecipeError, match=words):
        lpq.recipe("acme")
    assert lpq.recipe("acme-good") == lpq.recipe("mxfp8")
    assert lpq.recipe("nvfp4").name == "nvfp4"
    with pytest.raises(RecipeError, match=r"^wgrad: recipe acme of plugin acme .*'int7'"):
        lpq.recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=acme")


@pytest.mark.parametrize(
    ("recipe", "word"), [
        ("fprop=mxfp8, dgrad=mxfp8", "nothing is said of wgrad"),
        ({"fprop": "mxfp8", "dgrad": "mxfp8", "wgard": "mxfp8"}, "unknown key 'wgard': did you mean 'wgrad'"),
        ("nvfp4(rht=true)", "dgrad cannot multiply its operands"), ("nvfp4(rth=true)", "did you mean 'rht'"),
        (8, "not 8"), ({"x": 8}, "not 8"),
    ]
)  # fmt: skip
def test_whatever_is_wrong_with_a_plugins_recipe_is_told_by_plugin_and_name(
    install: Install, recipe: object, word: str
) -> None:
    install("acme", "1.2", recipes(acme=recipe))
    with pytest.raises(PluginRecipeError, match="recipe acme of plugin acme") as error:
        lpq.recipe("acme")
    assert word in str(error.value)


def test_a_recipe_made_of_itself_is_refused_in_words(install: Install) -> None:
    install(
        "acme", "1.2", recipes(acme="acme", acme__a="fprop=mxfp8, dgrad=acme-b, wgrad=bf16", acme__b={"x": "acme-a"})
    )
    with pytest.raises(PluginRecipeError, match=r"recipe acme of .* made of itself \(acme → acme\).*acme\(\)"):
        lpq.recipe("acme")
    with pytest.raises(PluginRecipeError, match=r"made of itself \(acme-a → acme-b → acme-a\)"):
        lpq.recipe("acme-a")


def test_the_recipe_at_fault_is_named_and_not_those_made_of_it(install: Install) -> None:
    install("acme", "1.2", recipes(acme="fprop=mxfp8, dgrad=acme-bad, wgrad=bf16", acme__bad="int7"))
    with pytest.raises(PluginRecipeError) as error:
        lpq.recipe("acme")
    assert str(error.value).count("cannot be built") == 1
    assert "recipe acme-bad of plugin acme" in str(error.value)


def test_the_recipe_of_a_plugin_that_cannot_be_imported(install: Install) -> None:
    install("broken", "1.2", "raise RuntimeError('out of order')")
    install("acme", "1.2", recipes(acme="fprop=mxfp8, dgrad=broken, wgrad=bf16"))
    with pytest.raises(PluginError, match=r"plugin broken \(lpq-broken 1\.2\).*out of order"):
        lpq.recipe("broken")
    words = r"recipe acme of plugin acme .*dgrad: plugin broken .*out of order"
    with pytest.raises(PluginRecipeError, match=words) as error:
        lpq.recipe("acme")
    assert str(error.value).count("Remedy: ") == 1
    with pytest.raises(RecipeError, match=r"^wgrad: plugin broken .*out of order"):
        lpq.recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=broken")
    assert lpq.recipe("mxfp8").name == "mxfp8"


def test_a_kept_recipe_does_not_need_the_plugin_that_named_it(install: Install) -> None:
    install("acme", "1.2", recipes(acme="fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"))
    recipe = lpq.recipe("acme")
    table, text = recipe.to_dict(), str(recipe)
    assert "acme" not in text
    assert lpq.recipe({k: v for k, v in table.items() if k != "name"}) == lpq.recipe(text) == recipe


# ------------------------------------------------------------------------------------------ known names


KNOWN = {
    "tensorwise": "fp8-current", "Float8CurrentScaling": "fp8-current", "rowwise": "fp8-row",
    "rowwise_with_gw_hp": "fp8-row-bf16-wgrad", "blockwise": "fp8-block", "DelayedScaling": "fp8-delayed",
    "delayedscaling": "fp8-delayed", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4",
    "MXFP4BlockScaling": "mxfp4",
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
    with pytest.raises(PluginError, match=r"aliases=.*write a tuple|'two words' is not a name"):
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
