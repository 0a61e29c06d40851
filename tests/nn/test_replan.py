"""The length of a run that is given after the conversion."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.small_models import converted

import lpq
from lpq.recipes import RecipeError

FRACTIONS = {
    "rules": [
        {"match": "0", "recipe": "nvfp4", "until": 0.5},
        {"match": "0", "recipe": "mxfp8", "until": 0.8},
        {"match": "*", "recipe": "fp8-current"},
    ]
}

NAMES = ("nvfp4", "mxfp8", "fp8-current")
SIZES = (32, 32, 32)


def titles(model: Any, steps: range) -> list[str]:
    found = []
    for step in steps:
        lpq.set_step(model, step)
        found.append(next(name for name in NAMES if model[0].recipe == lpq.recipe(name)))
    return found


def test_a_model_gets_the_length_of_its_run_later() -> None:
    later = converted(FRACTIONS, *SIZES, steps="later")
    assert "nvfp4 until 0.5 of the run, then mxfp8 until 0.8 of the run, then fp8-current" in str(lpq.report(later))
    lpq.replan(later, steps=10)
    told = converted(FRACTIONS, *SIZES, steps=10)
    assert str(lpq.report(later)) == str(lpq.report(told))
    assert titles(later, range(11)) == titles(told, range(11))
    assert len(set(titles(later, range(11)))) == 3
    lpq.replan(copy.deepcopy(later), steps=20)
    assert titles(later, range(11)) == titles(told, range(11))


def test_until_then_it_is_at_step_0() -> None:
    model = converted(FRACTIONS, *SIZES, steps="later")
    assert titles(model, range(1)) == ["nvfp4"]
    with pytest.raises(RecipeError, match=r"until = 0\.5 .* call lpq\.replan\(model, steps=…\)"):
        lpq.set_step(model, 1)
    without = converted({"rules": [{"match": "*", "recipe": "mxfp8", "until": 5}]}, *SIZES, steps="later")
    assert titles(without, range(5)) == ["mxfp8"] * 5
    mixed = [{"match": "*", "recipe": "mxfp8", "until": 5}, {"match": "*", "recipe": "nvfp4", "until": 0.5}]
    both = converted({"rules": mixed}, *SIZES, steps="later")
    assert titles(both, range(5)) == ["mxfp8"] * 5
    with pytest.raises(RecipeError, match=r"lpq\.replan"):
        lpq.set_step(both, 5)


def test_a_model_may_be_planned_again() -> None:
    model = converted(FRACTIONS, *SIZES, steps=1000)
    lpq.set_step(model, 700)
    lpq.replan(pickle.loads(pickle.dumps(model)), steps=5)
    lpq.replan(model, steps=4)
    assert model[0].recipe == lpq.recipe("mxfp8")  # as it was, until the next step is told
    assert titles(model, range(5)) == ["nvfp4", "nvfp4", "mxfp8", "mxfp8", "fp8-current"]
    assert "until step 2, then mxfp8 until step 4" in str(lpq.report(model))
    lpq.replan(model, steps=1)  # each fraction of one step is the step
    assert titles(model, range(2)) == ["nvfp4", "fp8-current"]
    assert lpq.report(model).unreached == (2,)


def test_parts_that_were_converted_by_themselves_keep_their_policies() -> None:
    model = converted(FRACTIONS, *SIZES, steps=10)
    lpq.convert(model[1], {"rules": [{"match": "*", "recipe": "mxfp8", "until": 0.5}]}, steps="later")
    lpq.replan(model, steps=4)
    lpq.set_step(model, 1)
    assert (model[0].recipe, model[1].recipe) == (lpq.recipe("nvfp4"), lpq.recipe("mxfp8"))
    lpq.set_step(model, 2)
    assert (model[0].recipe, model[1].recipe) == (lpq.recipe("mxfp8"), None)
    assert {m.lpq_conversion.steps for m in (model, model[1])} == {4}


def test_a_plan_that_a_stored_weight_cannot_follow_is_refused_and_nothing_is_changed() -> None:
    rules = [
        {"match": "*", "recipe": "mxfp8", "until": 0.5},
        {"match": "*", "recipe": "nvfp4", "until": 0.9},
        {"match": "*", "recipe": "mxfp8"},
    ]
    model = converted({"rules": rules}, *SIZES, steps=1, weights="quantized")  # in one step the second never holds
    before = str(lpq.report(model))
    with pytest.raises(RecipeError, match=r"0: its weight is stored as mxfp8"):
        lpq.replan(model, steps=100)
    assert str(lpq.report(model)) == before
    assert len(model[0].schedule.pieces) == 1


def test_a_length_that_was_never_given_is_saved_as_it_is(tmp_path: Any) -> None:
    model = converted(FRACTIONS, *SIZES, steps="later")
    lpq.checkpoint.save(model, tmp_path / "c")
    assert lpq.checkpoint.info(tmp_path / "c").steps == "later"
    again = converted(FRACTIONS, *SIZES, steps="later")
    lpq.checkpoint.load(again, tmp_path / "c")
    assert torch.equal(again[0].weight, model[0].weight)
    lpq.replan(again, steps=10)
    with pytest.raises(lpq.checkpoint.CheckpointError, match="another policy"):
        lpq.checkpoint.load(again, tmp_path / "c")
