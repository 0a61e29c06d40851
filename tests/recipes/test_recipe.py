"""Recipe: data about three products that survives being kept, and the quantizers of whole tensors."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lpq
from lpq.recipes import Gemm, Recipe, RecipeError
from lpq.recipes.gemms import OPERANDS

NAMES = [
    "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-row-bf16-wgrad", "fp8-block", "mxfp8", "nvfp4",
    "nvfp4-four-over-six", "nvfp4-eden", "nvfp4-eden-delayed",
    "nvfp4-row-fwd-mxfp8-bwd", "nvfp4-row-fwd-decoded-bwd", "mxfp8-one-copy",
    "fp8-block-one-copy",
    "mxfp8-fwd-nvfp4-bwd", "nvfp4-fwd-mxfp8-bwd", "mxfp8-fwd-bf16-bwd", "nvfp4-fwd-bf16-bwd",
]  # fmt: skip
QUANTIZERS = [
    "identity", "mxfp8", "mxfp8(dtype=e5m2)", "nvfp4", "nvfp4(block=16x16)", "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)", "fp8", "fp8(dtype=e5m2)", "fp8(scaling=delayed, history=16)",
    "fp8(scaling=block, block=128x128)", "hybrid(row=mxfp8, col=nvfp4)",
    "hybrid(row=nvfp4, col=nvfp4(rht=true))", "hybrid(row=mxfp8, col=identity, col_source=row)",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def gemms(draw: st.DrawFn, name: str) -> Gemm:
    """Two operands that can be multiplied."""
    first, second = (operand for operand in OPERANDS if operand.gemm == name)
    every = [lpq.quantizer(text) for text in QUANTIZERS]
    a = draw(st.sampled_from(every))
    rotation = a.side(first.side).rotation
    b = draw(st.sampled_from([q for q in every if q.side(second.side).rotation == rotation]))
    return Gemm(a, b, draw(st.sampled_from([None, True, False])))


RECIPES = st.builds(Recipe, gemms("fprop"), gemms("dgrad"), gemms("wgrad"), st.none() | TEXT)


def uniform(text: str) -> Gemm:
    return Gemm(lpq.quantizer(text), lpq.quantizer(text))


# ---------------------------------------------------------------------------------- the named recipes


@pytest.mark.parametrize("name", NAMES)
def test_named_recipes_build_and_print(name: str) -> None:
    recipe = lpq.recipe(name)
    assert recipe.name == recipe.title == name
    assert lpq.recipe(str(recipe)) == recipe
    assert "\n" not in str(recipe)
    assert eval(repr(recipe), {"lpq": lpq}) == recipe
    assert [other for other in NAMES if lpq.recipe(other) == recipe] == [name]
    file = io.BytesIO()
    torch.save({"recipe": recipe.to_dict()}, file)
    file.seek(0)
    assert lpq.recipe(torch.load(file, weights_only=True)["recipe"]) == recipe


def test_directions_of_the_mixed_recipes() -> None:
    mixed, mxfp8, nvfp4 = (lpq.recipe(n) for n in ("mxfp8-fwd-nvfp4-bwd", "mxfp8", "nvfp4"))
    assert (mixed.fprop, mixed.dgrad, mixed.wgrad) == (mxfp8.fprop, nvfp4.dgrad, nvfp4.wgrad)
    other, bf16 = lpq.recipe("nvfp4-fwd-bf16-bwd"), lpq.recipe("bf16")
    assert (other.fprop, other.dgrad, other.wgrad) == (nvfp4.fprop, bf16.dgrad, bf16.wgrad)


# ---------------------------------------------------------------------------------- whole tensors


def test_a_tensors_quantizer_is_its_two_operands() -> None:
    recipe = lpq.recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
    assert recipe.x == lpq.quantizer("hybrid", row="mxfp8", col=lpq.recipe("bf16").x)
    assert recipe.w.side("row") == lpq.quantizer("mxfp8")
    assert recipe.w.side("col") == lpq.quantizer("nvfp4(block=16x16)")
    assert recipe.dy.side("row") == recipe.dgrad.a.side("row")
    assert recipe.dy.side("col") == lpq.recipe("bf16").dy
    assert recipe.x is recipe.x


@given(RECIPES)
def test_joining_two_operands_keeps_both(recipe: Recipe) -> None:
    for operand, quantizer in recipe.operands.items():
        whole = getattr(recipe, operand.tensor)
        assert whole.side(operand.side) == quantizer.side(operand.side)
        assert operand.side == "row" or whole.col_source == quantizer.col_source
    x, w, dy = recipe.x, recipe.w, recipe.dy
    fprop, dgrad = (x.side("row"), w.side("row")), (dy.side("row"), w.side("col"))
    assert recipe.products == {"fprop": fprop, "dgrad": dgrad, "wgrad": (dy.side("col"), x.side("col"))}


@pytest.mark.parametrize("text", QUANTIZERS)
def test_one_quantizer_for_both_operands_stays_itself(text: str) -> None:
    gemm = uniform(text)
    if gemm.a.side("row").rotation == gemm.a.side("col").rotation:
        recipe = Recipe(gemm, gemm, gemm)
        assert recipe.x is recipe.w is recipe.dy is gemm.a


def test_operands_that_are_the_two_sides_of_one_quantizer_need_no_hybrid() -> None:
    apart = lpq.recipe({"fprop": "nvfp4()", "dgrad": "nvfp4()", "wgrad": "nvfp4(rht=true)"})
    assert apart.x == apart.dy == lpq.quantizer("nvfp4(rht=true)")
    assert lpq.recipe({"fprop": "nvfp4(rht=true)", "dgrad": "nvfp4()", "wgrad": "nvfp4(rht=true)"}).x == apart.x


# ---------------------------------------------------------------------------------- keeping it


@given(RECIPES)
def test_every_way_of_keeping_a_recipe_gives_it_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("recipe") / "kept.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert lpq.recipe(str(recipe)) == recipe
    assert lpq.recipe(str(path)) == recipe
    assert lpq.recipe(path).name == (recipe.name if recipe.name is not None else "kept")
    for kept in (lpq.recipe(recipe.to_dict()), pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert kept == lpq.recipe(path) == recipe
        assert (hash(kept), kept.name) == (hash(recipe), recipe.name)


def test_a_pickle_holds_the_fields_and_not_what_was_computed() -> None:
    recipe, fresh = lpq.recipe("nvfp4"), lpq.recipe("nvfp4")
    assert recipe.text
    assert recipe.operands
    assert set(recipe.__getstate__()) == {"fprop", "dgrad", "wgrad", "name", "save_x", "save_w"}
    assert len(pickle.dumps(recipe)) == len(pickle.dumps(fresh))


def test_the_name_decides_nothing() -> None:
    a, b = (Recipe(uniform("mxfp8"), uniform("mxfp8"), uniform("mxfp8"), name=n) for n in ("a", None))
    assert a == b
    assert hash(a) == hash(b)
    assert (a.title, b.title) == ("a", "mxfp8()")
    assert a != Recipe(uniform("mxfp8"), uniform("mxfp8"), uniform("identity"), name="a")
    assert a != Recipe(Gemm(a.fprop.a, a.fprop.b, True), a.dgrad, a.wgrad, name="a")


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        lpq.recipe("mxfp8").name = "other"
    with pytest.raises(FrozenInstanceError):
        lpq.recipe("mxfp8").fprop.fast_accumulate = True


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("mxfp8()", "mxfp8()"),
        ("fprop=mxfp8(), dgrad=mxfp8(dtype=e5m2), wgrad=identity()", None),
        ("x=fp8(), w=fp8(), dy=fp8(dtype=e5m2)", None),
        ("fprop=mxfp8(), dgrad=mxfp8(), wgrad=mxfp8(), wgrad.fast_accumulate=true", None),
        ("fprop.x=mxfp8(), fprop.w=identity(), dgrad=identity(), wgrad=mxfp8()", None),
        (
            "x=mxfp8(), dgrad.w=fp8(), fprop.w=identity(), dy=mxfp8()",
            "x=mxfp8(), fprop.w=identity(), dgrad.w=fp8(), dy=mxfp8()",
        ),
    ],
)
def test_the_text_is_compact(source: str, text: str | None) -> None:
    assert str(lpq.recipe(source)) == (text or source)


def test_the_toml_is_what_a_person_would_write(tmp_path: Path) -> None:
    wgrad = {"dy": "identity", "x": "identity", "fast_accumulate": False}
    recipe = lpq.recipe({"name": "mine", "fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": wgrad})
    assert recipe.to_toml() == (
        'name = "mine"\n\n[fprop]\nx = "mxfp8()"\nw = "mxfp8()"\n\n[dgrad]\ndy = "mxfp8()"\nw = "mxfp8()"\n\n'
        '[wgrad]\ndy = "identity()"\nx = "identity()"\nfast_accumulate = false\n'
    )


# ---------------------------------------------------------------------------------- what is refused


def test_operands_in_different_bases_are_refused() -> None:
    plain, rotated = uniform("nvfp4"), uniform("nvfp4(rht=true)")
    assert Recipe(rotated, plain, rotated).wgrad is rotated
    with pytest.raises(RecipeError, match="dgrad") as error:
        Recipe(plain, rotated, plain)
    for word in ("dy.row = nvfp4 is not rotated", "w.col = nvfp4(rht=true) is rotated by", "dgrad.dy", "dgrad.w"):
        assert word in str(error.value)
    with pytest.raises(RecipeError, match=r"wgrad cannot multiply its operands: dy\.col = .* is rotated by .*x\.col"):
        Recipe(plain, plain, Gemm(rotated.a, plain.b))
    with pytest.raises(RecipeError, match="dgrad"):
        lpq.recipe("nvfp4(rht=true)")


MXFP8 = uniform("mxfp8")
WRONG = [
    (lambda: Gemm("mxfp8", MXFP8.b), r"must be a quantizer, not 'mxfp8': lpq\.quantizer makes one"),
    (lambda: Recipe(MXFP8, "mxfp8", MXFP8), r"dgrad must be a Gemm, not 'mxfp8': lpq\.recipe takes strings"),
    (lambda: Gemm(MXFP8.a, MXFP8.b, 1), "fast_accumulate must be true or false, not 1"),
    (lambda: Recipe(MXFP8, MXFP8, MXFP8, name=3), "name must be a string, not 3"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_wrong_types_are_refused_in_words(make, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make()
