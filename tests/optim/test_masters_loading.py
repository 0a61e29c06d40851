"""MasterWeights loads all of a state or nothing of it, with the hooks that torch's optimizers have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn
from torch.optim import AdamW

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights


def _model(last: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, last)), "fp8-current", weights="quantized")


def _optimizer(model: nn.Module) -> MasterWeights:
    return MasterWeights(AdamW(model.parameters(), lr=0.1))


def _step(model: nn.Module, optimizer: MasterWeights, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _saved(last: int = 64) -> dict[str, Any]:
    """The state of an optimizer that took a step."""
    model = _model(last)
    optimizer = _optimizer(model)
    _step(model, optimizer)
    return copy.deepcopy(optimizer.state_dict())


def _weights(model: nn.Module) -> list[Tensor]:
    stored = [p.detach() for p in model.parameters()]
    return [(p.dequantize() if isinstance(p, QuantizedTensor) else p).clone() for p in stored]


def _without_the_last_master(saved: dict[str, Any]) -> None:
    del saved["state"][2]["master"]


def _of_another_shape(saved: dict[str, Any]) -> None:
    saved["state"].update(_saved(last=32)["state"])


def _of_one_row(saved: dict[str, Any]) -> None:
    """Which could be copied to all."""
    saved["state"][2]["master"] = saved["state"][2]["master"][:1]


def _in_other_groups(saved: dict[str, Any]) -> None:
    (group,) = saved["param_groups"]
    saved["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]


def _of_fewer_parameters(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"] = [0, 1, 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_the_last_master, r"^1\.weight: the state has no master for parameter 2, a \[64, 32\] weight"),
        (
            _of_another_shape,
            r"^1\.weight: the state has a master of shape \[32, 32\] for parameter 2, a weight of shape \[64, 32\]: "
            "load a state of the same parameters",
        ),
        (_of_one_row, r"^1\.weight: the state has a master of shape \[1, 32\] for parameter 2"),
        (_in_other_groups, r"groups of \[2, 2\] parameters, and the optimizer of \[4\]: make its groups as they were"),
        (_of_fewer_parameters, r"groups of \[3\] parameters, and the optimizer of \[4\]"),
    ],
)
def test_of_a_state_that_does_not_fit_nothing_is_loaded(spoil: Any, words: str) -> None:
    """The run goes on as if nobody had tried."""
    found = []
    for tried in (False, True):
        model = _model()
        optimizer = _optimizer(model)
        _step(model, optimizer, seed=1)
        if tried:
            saved = _saved()
            spoil(saved)
            with pytest.raises(ValueError, match=words):
                optimizer.load_state_dict(saved)
        _step(model, optimizer, seed=2)
        found.append([*_weights(model), *optimizer.masters.values()])
    assert equal(*found)


def test_what_the_wrapped_optimizer_refuses_is_not_loaded_either() -> None:
    class Refusing(AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            raise RuntimeError("not today")

    model = _model()
    optimizer = MasterWeights(Refusing(model.parameters()))
    before = copy.deepcopy([*optimizer.masters.values()])
    with torch.no_grad():
        model[0].weight.fill_(2)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="not today"):
        optimizer.load_state_dict(_saved())
    assert equal(before, optimizer.masters.values())
    with pytest.raises(RuntimeError, match=r"^0\.weight: a \[32, 64\] weight was written to since"):
        _step(model, optimizer)


def test_hooks_of_loading_are_called_as_those_of_torchs_optimizers_are() -> None:
    saved, model = _saved(), _model()
    optimizer = _optimizer(model)
    calls: list[str] = []

    def rename(called: Any, state: dict[str, Any]) -> None:
        assert called is optimizer
        state["state"] = state.pop("renamed")
        calls.append("in place")

    def slower(called: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("another")
        return {**state, "param_groups": [{**group, "lr": 0.01} for group in state["param_groups"]]}

    def after(called: Any) -> None:
        assert torch.equal(called.masters[model[0].weight], saved["state"][0]["master"])  # type: ignore[index]
        assert torch.equal(called.state[model[0].weight]["exp_avg"], saved["state"][0]["exp_avg"])  # type: ignore[index]
        assert called.param_groups[0]["lr"] == 0.01
        called.param_groups[0]["lr"] = 0.001
        calls.append("after")

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_pre_hook(slower)
    optimizer.register_load_state_dict_post_hook(after)
    given = {"renamed": saved["state"], "param_groups": saved["param_groups"]}
    optimizer.load_state_dict(given)
    assert calls == ["in place", "another", "after"]
    assert given.keys() == {"renamed", "param_groups"}, "hooks have a copy"
    _step(model, optimizer)
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.001


def test_hooks_of_saving_see_what_is_saved_and_may_give_anything() -> None:
    model = _model()
    optimizer = _optimizer(model)
    calls: list[str] = []

    def before(called: Any) -> None:
        calls.append("before")

    def after(called: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert not any(state["master"].requires_grad for state in saved["state"].values() if "master" in state)
        calls.append("after")
        return {"renamed": saved["state"]}

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after)
    for begun in (False, True):
        saved = optimizer.state_dict()
        assert saved.keys() == {"renamed"}
        assert torch.equal(saved["renamed"][0]["master"], optimizer.masters[model[0].weight])  # type: ignore[index]
        assert bool(optimizer.state) == begun
        _step(model, optimizer)
    assert calls == ["before", "after"] * 2
