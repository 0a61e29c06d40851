"""A policy with stages: that nobody moves them is said once, and the length of the run may be given after the
conversion."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.small_models import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lpq
from lpq.nn import stages
from lpq.optim import MasterWeights
from lpq.recipes import RecipeError

WORDS = (
    r"an optimizer has made a step, and the policy's step is 0 as before: .* at step 8, .* lpq\.set_step\(model, step\)"
)


def staged(first: str, second: str, until: float = 8) -> Any:
    return {"rules": [{"match": "*", "recipe": first, "until": until}, {"match": "*", "recipe": second}]}


RULES, LATER = staged("mxfp8", "nvfp4"), staged("skip", "nvfp4")
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def net(policy: Any = RULES, **how: Any) -> Any:
    return converted(policy, 32, 32, 32, between=nn.GELU, **how)


def backward(model: nn.Module) -> None:
    model(X).square().mean().backward()


def said(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in told if "made a step" in str(warning.message)]


def steps(model: nn.Module, optimizer: Any, count: int = 3, micro: int = 1, move: bool = False, start: int = 0) -> None:
    for step in range(start, start + count):
        if move:
            lpq.set_step(model, step)
        for _ in range(micro):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),  # autograd does not count what it writes
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("policy", [RULES, LATER])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_pass_after_a_step_says_so_once(optimizer: str, policy: Any) -> None:
    model = net(policy)
    made = OPTIMIZERS[optimizer](model)
    assert said(lambda: (backward(model), backward(model), made.step())) == []
    model.eval()
    assert said(lambda: backward(model)) == []
    model.train()
    with torch.no_grad():
        assert said(lambda: model(X)) == []
    with pytest.warns(UserWarning, match=WORDS):
        backward(model)
    assert said(lambda: steps(model, made)) == []


def test_who_steps_is_left_in_peace() -> None:
    model = net(steps=12)
    optimizer = torch.optim.AdamW(model.parameters())
    assert said(lambda: steps(model, optimizer, 5, micro=3, move=True)) == []
    lpq.set_step(model, 8)
    assert said(lambda: steps(model, optimizer)) == [], "nothing changes any more"
    lpq.set_step(model, 3)
    assert len(said(lambda: steps(model, optimizer))) == 1, "and this rollback was not gone on from"
    for policy in ("mxfp8", staged("mxfp8", "mxfp8")):
        model = net(policy)
        assert said(lambda m=model: steps(m, torch.optim.AdamW(m.parameters()))) == []
        assert model[0].model.stages is None


def test_other_optimizers_are_not_taken_for_the_models() -> None:
    model, other = net(), net("mxfp8")
    assert said(lambda: (steps(other, torch.optim.SGD(other.parameters())), backward(model))) == []
    first, second = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())

    def loop() -> None:
        for step in range(4):
            lpq.set_step(model, step)
            backward(model)
            first.step()
            second.step()

    assert said(loop) == []
    model = net({"rules": [{"match": "*", "recipe": "mxfp8", "until": 8}]}, weights="high_precision")
    assert len(said(lambda: steps(model, torch.optim.SGD(model.parameters())))) == 1
    stays = staged("x=mxfp8, w=mxfp8, dy=bf16", "mxfp8")
    for move, count in ((True, 0), (False, 1)):
        model = net(stays, weights="quantized")
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
        assert len(said(lambda m=model, o=optimizer, move=move: steps(m, o, 4, move=move))) == count


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_sharded_models_are_told_too(weights: Any) -> None:
    """Their layers have other weights in forward than the optimizer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net(weights=weights)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        assert said(lambda: steps(model, optimizer, 4, micro=2, move=True)) == []
        assert len(said(lambda: steps(model, optimizer, 4))) == 1
    finally:
        dist.destroy_process_group()


def test_compiled_models_are_told_by_the_second_step() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        compiled(X).sum().backward()
        optimizer.step()

    assert said(step) == []
    assert len(said(lambda: (step(), step(), step()))) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("part", ["step", "forward"])
def test_replays_that_go_on_with_the_recipes_before_are_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs no Python: it is seen by what does not happen between two calls of ``set_step``."""
    recording = True
    monkeypatch.setattr(stages, "recording", lambda: recording)
    model = net()
    run = torch.compile(model, backend="eager") if part == "step" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def record() -> None:
        run(X).square().mean().backward()
        if part == "step":
            optimizer.step()

    def told(*numbers: int) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for number in numbers:
                lpq.set_step(model, number)
        return [str(one.message) for one in found if "recorded in a CUDA graph" in str(one.message)]

    lpq.set_step(model, 0)
    record()
    assert not told(1, 2, 7)  # replays of the recipes that the policy has
    (words,) = told(8, 9, 10)
    assert "recipes changed at step 8" in words
    lpq.set_step(model, 0)
    record()
    assert not told(8)
    record()  # again, as the warning says
    assert not told(9, 10)
    recording = False
    lpq.set_step(model, 0)
    record()
    assert not told(8, 9)  # nobody records: the loop skips steps


def test_copies_and_pickles_are_models_of_their_own() -> None:
    model = net()
    twins = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    for twin in twins:
        assert said(lambda t=twin: backward(t)) == []
        lpq.set_step(twin, 8)
        assert twin[0].recipe == lpq.recipe("nvfp4")
    assert len(said(lambda: backward(model))) == 1


def test_a_model_that_is_gone_is_not_kept() -> None:
    there = weakref.ref(net())
    gc.collect()
    assert there() is None


def test_a_length_that_is_given_later_counts() -> None:
    half = staged("mxfp8", "nvfp4", until=0.5)
    model = net(half, steps="later")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    words = r"the policy's step is 0 as before: its recipes change by step, and do so only"
    with pytest.warns(UserWarning, match=words):
        backward(model)
    lpq.replan(lpq.convert(model, half, steps="later"), steps=10)
    lpq.set_step(model, 5)
    assert said(lambda: steps(model, optimizer)) == []


def test_a_step_beyond_the_run_is_refused() -> None:
    model = net(steps=10)
    lpq.set_step(model, 10)
    with pytest.raises(ValueError, match=r"step 11 is beyond the run, .* has steps=10: convert with .* lpq\.replan"):
        lpq.set_step(model, 11)
    assert model[0].recipe == lpq.recipe("nvfp4")
    lpq.replan(model, steps=20)
    lpq.set_step(model, 11)
    lpq.set_step(net(), 10**6)


# ---------------------------------------------------------------------------------------- a length that is given later


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


def test_the_report_says_which_recipe_holds_now() -> None:
    model = net(LATER)
    for step, now in ((0, "left alone"), (8, "nvfp4"), (7, "left alone")):
        lpq.set_step(model, step)
        notes = {entry.note for entry in lpq.report(model).converted}
        assert notes == {f"left alone until step 8, then nvfp4; now: {now}"}
    model[0].recipe = "mxfp8"
    assert lpq.report(model).converted[0].note == "left alone until step 8, then nvfp4; since then mxfp8"
    assert lpq.report(net("mxfp8")).converted[0].note == "mxfp8"


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
