"""lpq.recipe: names, grammar, mappings and files mean the same, and mistakes are told with their place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lpq
from lpq import recipes
from lpq.recipes import RecipeError
from lpq.registry.errors import GrammarError, LpqError, OptionError, UnknownFormat, UnknownRecipe

# ---------------------------------------------------------------------------------- what the sources mean


def test_a_name_is_a_recipe_before_it_is_a_format() -> None:
    assert lpq.recipe("nvfp4") != lpq.recipe("nvfp4()")
    assert lpq.recipe("nvfp4()").x == lpq.quantizer("nvfp4")
    assert lpq.recipe("identity").w == lpq.quantizer("identity")  # a format, and no recipe has its name


def test_a_quantizer_is_given_to_every_operand() -> None:
    quantizer = lpq.quantizer("nvfp4(block=16x16)")
    for source in ("nvfp4(block=16x16)", " nvfp4( block = 16x16 ) ", quantizer):
        assert set(lpq.recipe(source).operands.values()) == {quantizer}
    assert lpq.recipe("hybrid(row=mxfp8, col=nvfp4)").dy == lpq.quantizer("hybrid(row=mxfp8, col=nvfp4)")


def test_a_recipe_is_returned_as_it_is() -> None:
    recipe = lpq.recipe("mxfp8")
    assert lpq.recipe(recipe) is recipe


def test_the_grammar_takes_each_gemm_of_the_recipe_it_names() -> None:
    recipe = lpq.recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
    assert recipe.fprop == lpq.recipe("mxfp8").fprop
    assert recipe.dgrad == lpq.recipe("nvfp4").dgrad
    assert recipe.wgrad == lpq.recipe("bf16").wgrad
    assert recipe.dgrad != lpq.recipe("nvfp4()").dgrad
    assert recipe.name == "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"


def test_a_tensor_takes_its_operands_of_the_recipe_it_names() -> None:
    recipe = lpq.recipe("x=mxfp8, w=nvfp4, dy=fp8-current")
    nvfp4 = lpq.recipe("nvfp4")
    assert (recipe.fprop.b, recipe.dgrad.b) == (nvfp4.fprop.b, nvfp4.dgrad.b)
    assert (recipe.dy.dtype, recipe.x) == ("e5m2", lpq.quantizer("mxfp8"))


def test_an_operand_overrides_its_gemm_and_its_tensor_in_any_order() -> None:
    for text in ("fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8, wgrad.dy=nvfp4(stochastic=true)",
                 "wgrad.dy=nvfp4(stochastic=true), wgrad=mxfp8, dgrad=mxfp8, fprop=mxfp8",
                 "x=mxfp8, w=mxfp8, dy=mxfp8, wgrad.dy=nvfp4(stochastic=true)"):  # fmt: skip
        recipe = lpq.recipe(text)
        assert recipe.wgrad.a == lpq.quantizer("nvfp4(stochastic=true)")
        assert recipe.wgrad.b == recipe.dgrad.a == recipe.dgrad.b == lpq.quantizer("mxfp8")


def test_accumulation_is_an_option_of_a_gemm_and_comes_with_one() -> None:
    recipe = lpq.recipe("fprop=fp8-current, dgrad=fp8-current, wgrad=fp8-current, dgrad.fast_accumulate=true")
    assert [recipe.gemm(g).fast_accumulate for g in ("fprop", "dgrad", "wgrad")] == [None, True, None]
    same = {"fprop": recipe, "dgrad": recipe, "wgrad": recipe}
    assert lpq.recipe(same) == recipe
    assert lpq.recipe({"dgrad.fast_accumulate": False, **same}).dgrad.fast_accumulate is False
    assert lpq.recipe({"x": recipe, "w": recipe, "dy": recipe}).dgrad.fast_accumulate is None


def test_mappings_nest_or_not() -> None:
    flat = {"fprop": "mxfp8", "dgrad.dy": "nvfp4()", "dgrad.w": "identity", "wgrad": lpq.quantizer("mxfp8")}
    nested = {
        "fprop": {"x": "mxfp8", "w": "mxfp8"},
        "dgrad": {"dy": "nvfp4", "w": "identity"},
        "wgrad": "mxfp8",
    }
    assert lpq.recipe(flat) == lpq.recipe({**nested, "dgrad": {"dy": "nvfp4()", "w": "identity"}})
    assert lpq.recipe(flat) != lpq.recipe(nested)
    assert lpq.recipe(flat).name is None
    assert lpq.recipe({**flat, "name": "mine"}).name == "mine"


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text('fprop = "mxfp8"\ndgrad = "nvfp4"\n[wgrad]\ndy = "bf16"\nx = "bf16"\n')
    assert lpq.recipe(path) == lpq.recipe(str(path)) == lpq.recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
    assert lpq.recipe(path).title == "tuned"


# ---------------------------------------------------------------------------------- what is wrong, and where

MXFP8 = {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("mxfp9", UnknownRecipe, ["no recipe, policy or format 'mxfp9'", "did you mean 'mxfp8'", "lpq recipes"]),
        ("identiti", UnknownRecipe, ["did you mean 'identity'"]),
        ("fp8-curent", UnknownRecipe, ["did you mean 'fp8-current'"]),
        ("mxfp9(dtype=e5m2)", UnknownFormat, ["format 'mxfp9'", "did you mean 'mxfp8'"]),
        ("nvfp4(rth=true)", OptionError, ["nvfp4 has no option 'rth'", "did you mean 'rht'"]),
        ("nvfp4(", GrammarError, ["nvfp4("]),
        (" ", RecipeError, ["a recipe needs a name, and this is empty"]),
        (__file__, RecipeError, ["is a file: one in TOML ends in .toml, or is given as a pathlib.Path"]),
        ("nvfp4(" + 4096 * "a", GrammarError, ["nvfp4("]),
        ("mxfp8, dy=bf16", RecipeError, ["'mxfp8' stands without a key", "'x=mxfp8, w=mxfp8, dy=…'"]),
        ({"*": "mxfp8"}, RecipeError, ["'*' is a pattern of layers: {'rules': [{'match': '*', 'recipe': …}]}"]),
        ("mxfp8, nvfp4", GrammarError, ["expected nothing more"]),
        ("fprop=mxfp8 dgrad=nvfp4", GrammarError, ["expected ','"]),
        ("fprop=mxfp8, fprop=nvfp4", GrammarError, ["'fprop' is given twice"]),
        ("fprop=mxfp8, dgrad=nvfp4", RecipeError, ["nothing is said of wgrad", "add wgrad=…"]),
        ("wgrad=mxfp8, dgrad.dy=nvfp4", RecipeError, ["of fprop and dgrad.w: add fprop=…, dgrad.w=…"]),
        ("x=mxfp8, w=mxfp8", RecipeError, ["nothing is said of dy: add dy=… with"]),
        ("x=mxfp8", RecipeError, ["nothing is said of w and dy: add w=…, dy=… with"]),
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=bf16()", RecipeError, ["wgrad: 'bf16' is a recipe", "without parentheses"]),
        ("fprob=mxfp8, dgrad=bf16", RecipeError, ["unknown key 'fprob'", "did you mean 'fprop'"]),
        ({**MXFP8, "dgrad.x": "mxfp8"}, RecipeError, ["unknown key 'dgrad.x'", "did you mean"]),
        ({**MXFP8, "wgrad": {"dy": "mxfp8", "xx": "mxfp8"}}, RecipeError, ["'wgrad.xx'", "'wgrad.x'"]),
        ({**MXFP8, "fprop": "mxfp9"}, RecipeError, ["fprop: ", "'mxfp9'", "did you mean 'mxfp8'"]),
        ({**MXFP8, "wgrad": "nvfp4(rth=true)"}, RecipeError, ["wgrad: nvfp4 has no option 'rth'"]),
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8, x=nvfp4", RecipeError, ["fprop and x both give fprop.x"]),
        ({"wgrad.x": "bf16", "wgrad": {"x": "bf16"}}, RecipeError, ["both give wgrad.x"]),
        ({**MXFP8, "fprop": 8}, RecipeError, ["fprop: expected the name of a recipe or a quantizer, not 8"]),
        ({**MXFP8, "name": 8}, RecipeError, ["name must be a string, not 8"]),
        ({**MXFP8, "fprop.fast_accumulate": 1}, RecipeError, ["fprop.fast_accumulate: it must", "not 1"]),
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8, fprop.fast_accumulate=yes", RecipeError, ["not 'yes'"]),
        ({**MXFP8, "dgrad": "nvfp4(rht=true)"}, RecipeError, ["dgrad cannot multiply", "rotated by"]),
        ({**MXFP8, "wgrad.dy": "bf16", "wgrad": "nvfp4"}, RecipeError, ["wgrad cannot multiply", "wgrad.x"]),
        ({"rules": []}, RecipeError, ["this is a policy", "lpq.policy"]),
        (8, RecipeError, ["expected the name of a recipe or a quantizer, not 8"]),
        (None, RecipeError, ["not None"]),
        ({}, RecipeError, ["nothing is said of fprop and dgrad and wgrad"]),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_told(source: object, kind: type[LpqError], words: list[str]) -> None:
    with pytest.raises(kind) as error:
        lpq.recipe(source)
    for word in words:
        assert word in str(error.value)


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    with pytest.raises(RecipeError, match=r"wrong\.toml cannot be read: No such file"):
        lpq.recipe(path)
    for text, words in [
        ("fprop\n", ["is not TOML", "line 1"]),
        ('fprop = "mxfp9"', [": fprop: ", "'mxfp9'"]),
        ('fprop = "mxfp8"\n[wgrad]\ndz = "mxfp8"', [": unknown key 'wgrad.dz'"]),
        ('[[rules]]\nmatch = "*"', ["this is a policy", "lpq.policy"]),
    ]:
        path.write_text(text)
        with pytest.raises(RecipeError) as error:
            lpq.recipe(str(path))
        assert str(error.value).startswith(str(path))
        assert all(word in str(error.value) for word in words)


def test_a_wrapped_error_keeps_its_cause() -> None:
    with pytest.raises(RecipeError) as error:
        lpq.policy({"rules": [{"match": "*", "recipe": "fprop=mxfp9, dgrad=mxfp8, wgrad=mxfp8"}]})
    assert str(error.value).startswith("rule 1: recipe: fprop: ")
    assert isinstance(error.value.__cause__, UnknownRecipe)


def test_recipes_import_no_plugin_and_name_no_format_but_the_hybrid_and_the_identity() -> None:
    strings: list[str] = []
    for path in Path(recipes.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("lpq_") for name in imported), path
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                strings.append(node.value)
    formats = set(lpq.registry.formats())
    assert {"hybrid", "identity"} <= formats
    assert sorted(s for s in strings if s in formats) == ["hybrid", "identity"]


def test_a_file_of_another_suffix_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.txt").write_text("")
    with pytest.raises(RecipeError, match=r"policy\.txt is a file: one in TOML ends in \.toml"):
        lpq.recipe("policy.txt")
