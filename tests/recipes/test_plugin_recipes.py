"""Recipes that plugins bring: they stand beside lpq's own, and a broken one breaks nothing else."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lpq
from lpq import registry
from lpq.recipes import PluginRecipeError, RecipeError
from lpq.registry import RecipeSpec, hookimpl
from lpq.registry.errors import PluginError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one plugin on the path: ``install("acme", "…source…")``."""

    def write(name: str, source: str, version: str = "1.2") -> None:
        package, metadata = tmp_path / f"lpq_{name}.py", tmp_path / f"{name}_lowbits-{version}.dist-info"
        package.write_text(textwrap.dedent(source))
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-lowbits\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[lpq.plugins]\n{name} = lpq_{name}\n")
        registry.refresh()

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for module in [m for m in sys.modules if Path(getattr(sys.modules[m], "__file__", None) or "/").parent == tmp_path]:
        del sys.modules[module]
    monkeypatch.undo()
    registry.refresh()


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
    install("acme", recipes(acme="fprop=mxfp8, dgrad=int7, wgrad=bf16", acme__good="mxfp8"))
    words = r"(?s)recipe acme of plugin acme \(acme-lowbits 1\.2\) cannot be built.*dgrad: .*'int7'.*Remedy: "
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
        (8, "not 8"),
    ]
)  # fmt: skip
def test_whatever_is_wrong_with_a_plugins_recipe_is_told_by_plugin_and_name(
    install: Install, recipe: object, word: str
) -> None:
    install("acme", recipes(acme=recipe))
    with pytest.raises(PluginRecipeError, match="recipe acme of plugin acme") as error:
        lpq.recipe("acme")
    assert word in str(error.value)


def test_a_recipe_made_of_itself_is_refused_in_words(install: Install) -> None:
    install("acme", recipes(acme="acme", acme__a="fprop=mxfp8, dgrad=acme-b, wgrad=bf16", acme__b={"x": "acme-a"}))
    with pytest.raises(PluginRecipeError, match=r"recipe acme of .* made of itself \(acme → acme\).*acme\(\)"):
        lpq.recipe("acme")
    with pytest.raises(PluginRecipeError, match=r"made of itself \(acme-a → acme-b → acme-a\)"):
        lpq.recipe("acme-a")


def test_the_recipe_at_fault_is_named_and_not_those_made_of_it(install: Install) -> None:
    install("acme", recipes(acme="fprop=mxfp8, dgrad=acme-bad, wgrad=bf16", acme__bad="int7"))
    with pytest.raises(PluginRecipeError) as error:
        lpq.recipe("acme")
    assert str(error.value).count("cannot be built") == 1
    assert "recipe acme-bad of plugin acme" in str(error.value)


def test_the_recipe_of_a_plugin_that_cannot_be_imported(install: Install) -> None:
    install("broken", "raise RuntimeError('out of order')")
    install("acme", recipes(acme="fprop=mxfp8, dgrad=broken, wgrad=bf16"))
    with pytest.raises(PluginError, match=r"plugin broken \(broken-lowbits 1\.2\).*out of order"):
        lpq.recipe("broken")
    with pytest.raises(PluginRecipeError, match=r"recipe acme of plugin acme .*dgrad: plugin broken .*out of order"):
        lpq.recipe("acme")
    with pytest.raises(RecipeError, match=r"^wgrad: plugin broken .*out of order"):
        lpq.recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=broken")
    assert lpq.recipe("mxfp8").name == "mxfp8"


def test_a_kept_recipe_does_not_need_the_plugin_that_named_it(install: Install) -> None:
    install("acme", recipes(acme="fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"))
    recipe = lpq.recipe("acme")
    table, text = recipe.to_dict(), str(recipe)
    assert "acme" not in text
    assert lpq.recipe({k: v for k, v in table.items() if k != "name"}) == lpq.recipe(text) == recipe
