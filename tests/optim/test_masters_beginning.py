"""Masters of weights that convert rounded: they begin with rounded values unless others are given, and say so."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import lpq
from lpq.optim import MasterWeights, load_high_precision

WORDS = "masters begin with what weights decode to"
Between = Callable[[nn.Module, MasterWeights, dict[str, Any]], Any]


def pretrained() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def told(model: nn.Module, between: Between, *, keep: bool = True) -> int:
    """How many warnings of it two steps give; ``between``: what is done before them."""
    before = copy.deepcopy(model.state_dict())
    lpq.convert(model, "mxfp8", weights="quantized")
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
        for layer in model:  # type: ignore[attr-defined]
            layer.reset_parameters()
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1), keep=keep)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        between(model, optimizer, before)
        for _ in range(2):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    return sum(WORDS in str(warning.message) for warning in found)


def nothing(model: nn.Module, optimizer: MasterWeights, before: dict[str, Any]) -> None:
    """Done before the first step."""


def taken(model: nn.Module, optimizer: MasterWeights, before: dict[str, Any]) -> None:
    for weight in optimizer.masters:
        optimizer.take(weight)


def resumed(model: nn.Module, optimizer: MasterWeights, before: dict[str, Any]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_it_is_told_once_at_the_first_step() -> None:
    assert told(pretrained(), nothing) == 1


@pytest.mark.parametrize("between", [lambda m, o, before: load_high_precision(m, before, o), taken, resumed])
def test_masters_that_were_given_values_are_not_told_of(between: Between) -> None:
    assert told(pretrained(), between) == 0


def test_what_is_initialised_later_and_what_keeps_no_masters_is_not_told_of() -> None:
    with torch.device("meta"):
        model = pretrained()
    assert told(model, nothing) == 0
    assert told(pretrained(), nothing, keep=False) == 0


def test_codes_of_files_have_no_other_values(tmp_path: Path) -> None:
    lpq.export(lpq.convert(pretrained(), "fp8-row"), tmp_path / "files")
    model = lpq.load_quantized(pretrained(), tmp_path / "files")
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


class Noting(nn.Sequential):
    """A model that saves something beside its tensors."""

    note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_what_a_model_saves_beside_its_tensors_is_loaded_as_by_torch() -> None:
    """It ended in an AttributeError."""
    plain = Noting(nn.Linear(64, 64))
    plain.note = "trained"
    model = lpq.convert(Noting(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    load_high_precision(model, plain.state_dict())
    assert model.note == "trained"
    assert torch.equal(model[0].bias, plain[0].bias)
