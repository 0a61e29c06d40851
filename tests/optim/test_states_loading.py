"""States that a ``QuantizedStates`` with other options saved: they are stored as the one that loads them does it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import lpq
from lpq.optim import MasterWeights, QuantizedStates
from lpq.tensor import QuantizedTensor

FIRST, SECOND = {"exp_avg": "mxfp8"}, {"exp_avg_sq": "fp8(scaling=block, pow2=false)"}


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=random)
    optimizer.step()


@pytest.mark.parametrize("lacks", ["state", "param_groups", "both", "params"])
@pytest.mark.parametrize("wrapper", [MasterWeights, QuantizedStates])
def test_a_state_that_lacks_what_each_has(wrapper: Any, lacks: str) -> None:
    """A hook may add it before."""
    net = lpq.convert(nn.Sequential(nn.Linear(64, 128, bias=False)), "mxfp8", weights="quantized")
    net = net if wrapper is MasterWeights else nn.Linear(64, 128, bias=False)
    optimizer = wrapper(AdamW(net.parameters()), **FIRST if wrapper is QuantizedStates else {})
    _step(net, optimizer, 0)
    whole = copy.deepcopy(optimizer.state_dict())
    part: dict[str, Any] = {key: value for key, value in whole.items() if lacks not in (key, "both")}
    if lacks == "params":
        part["param_groups"] = [{k: v for k, v in group.items() if k != "params"} for group in whole["param_groups"]]
    missing = {"both": "a state without state and param_groups", "params": "a group without params"}
    words = missing.get(lacks, f"a state without {lacks}")
    with pytest.raises(
        ValueError, match=rf"^{wrapper.__name__}\.load_state_dict got {words}: pass what state_dict\(\)"
    ):
        optimizer.load_state_dict(part)
    with pytest.raises(TypeError, match=rf"^{wrapper.__name__}\.load_state_dict got a list: pass what"):
        optimizer.load_state_dict([part])
    optimizer.register_load_state_dict_pre_hook(lambda own, state: whole)
    optimizer.load_state_dict(part)


def _values(optimizer: QuantizedStates, p: Tensor) -> dict[str, Tensor]:
    """The decoded states, by the names that the wrapped optimizer has for them."""
    state = optimizer.state[p]
    decoded = {k: v.dequantize() if isinstance(v, QuantizedTensor) else v for k, v in state.items()}
    return {k.removesuffix("_root"): v.square() if k.endswith("_root") else v for k, v in decoded.items()}


@pytest.mark.parametrize(("make", "by_file"), [(AdamW, True), (Adam, False)])
@pytest.mark.parametrize(
    ("options", "stored"),
    [({"least": 10_000}, []), (FIRST, ["exp_avg"]), (SECOND, ["exp_avg_sq_root"]), ({"least": 1}, ["both"])],
)
def test_states_are_stored_as_the_options_say_that_load_them(
    make: Any, by_file: bool, options: dict[str, Any], stored: list[str], tmp_path: Path
) -> None:
    net = nn.Linear(64, 128, bias=False)
    optimizer = QuantizedStates(make(net.parameters()), **FIRST, **SECOND)
    _step(net, optimizer, 0)
    assert all(isinstance(optimizer.state[net.weight][key], QuantizedTensor) for key in ("exp_avg", "exp_avg_sq_root"))
    twin = copy.deepcopy(net)
    formats = options if "least" not in options else {**FIRST, **SECOND, **options}
    other = QuantizedStates(make(twin.parameters()), **formats)
    if by_file:
        lpq.checkpoint.save(net, tmp_path / "saved", optimizer)
        lpq.checkpoint.load(twin, tmp_path / "saved", other)
    else:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = [key for key, value in other.state[twin.weight].items() if isinstance(value, QuantizedTensor)]
    assert sorted(found) == (["exp_avg", "exp_avg_sq_root"] if stored == ["both"] else stored)
    before, after = _values(optimizer, net.weight), _values(other, twin.weight)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _step(twin, other, 1)


def test_a_state_that_is_none_is_loaded_and_reported() -> None:
    """As an earlier PyTorch saved it of SGD without momentum."""
    net = nn.Linear(64, 128)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "momentum": 0.0}]
    optimizer = QuantizedStates(SGD(groups, lr=0.1, momentum=0.9), momentum_buffer="mxfp8")
    _step(net, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = {"momentum_buffer": None}
    optimizer.load_state_dict(saved)
    _step(net, optimizer, 1)
    assert optimizer.report() == "momentum_buffer: mxfp8, of 1 tensors, 8192 elements in 8448 bytes on this rank"


@pytest.mark.parametrize("options", [FIRST, {**FIRST, **SECOND, "least": 10_000}])
def test_roots_that_torch_decoded_are_second_moments_again(options: dict[str, Any]) -> None:
    """As torch does where it gathers states. Without a format for the second moment the root stayed, and a step raised
    a KeyError."""
    net = nn.Linear(64, 128, bias=False)
    optimizer = QuantizedStates(AdamW(net.parameters()), **FIRST, **SECOND)
    _step(net, optimizer, 0)
    twin, saved = copy.deepcopy(net), copy.deepcopy(optimizer.state_dict())
    other = QuantizedStates(AdamW(twin.parameters()), **options)
    (state,) = saved["state"].values()
    state["exp_avg_sq_root"] = state["exp_avg_sq_root"].dequantize()
    other.load_state_dict(saved)
    assert torch.equal(other.state[twin.weight]["exp_avg_sq"], state["exp_avg_sq_root"].square())
    assert state["exp_avg_sq_root"].any()
    _step(twin, other, 1)
