"""The cost to the host of steps over stored states and over masters, with kernels that do nothing, and of wrapping an
optimizer: how often something is done, and not its time."""

from __future__ import annotations

import pytest
import torch
from imitated_gpu import calls_of
from torch import nn

import lpq
from lpq.optim import MasterWeights, QuantizedStates, adamw, masters, states

FORMATS = {"exp_avg": "mxfp8", "exp_avg_sq": "fp8(scaling=block, pow2=false)"}
CALLS = 13
"""Python's calls for each parameter whose moments are stored."""
CALLS_OF_MASTERS = 17
"""The same for each stored weight with a master."""


def _stepped(count: int, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> QuantizedStates:
    """An optimizer of ``count`` matrices, after a step for which there was a kernel."""
    params = [nn.Parameter(torch.ones(64, 128)) for _ in range(count)]
    optimizer = QuantizedStates(torch.optim.AdamW(params), **FORMATS)
    tiles = adamw.Tiles(*2 * [adamw.StoredTile(None, None, 0, 32)], 0.0)
    monkeypatch.setattr(adamw, "tiles", lambda *_: tiles)
    monkeypatch.setattr(adamw, "step_kernel", lambda launch: launched.append(len(launch.works)))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_one_launch_steps_all_parameters_that_are_stepped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    optimizer = _stepped(5, launched, monkeypatch)
    group = optimizer.param_groups[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))], "lr": 0.5})
    late = optimizer.param_groups[1]["params"][0]
    late.grad = torch.ones_like(late)
    group["params"][0].grad = None
    group["params"][1].grad = torch.ones(128, 64).t()
    optimizer.step()
    assert sorted(launched) == [1, 1, 3, 5]  # a gradient that is copied has one of its own, and so has another rate
    assert [int(optimizer.state[p]["step"]) for p in (*group["params"], late)] == [1, 2, 2, 2, 2, 1]


def test_a_launch_does_not_wait_when_it_has_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    optimizer = _stepped(5, launched, monkeypatch)
    monkeypatch.setattr(adamw, "TOGETHER", 2 * 64 * 128)
    optimizer.step()
    assert launched == [5, 2, 2, 1]
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_a_parameter_that_is_given_twice_takes_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    optimizer = _stepped(3, launched, monkeypatch)
    params = optimizer.param_groups[0]["params"]
    params.append(params[0])
    optimizer.step()
    assert launched == [3, 3, 1]
    assert [int(optimizer.state[p]["step"]) for p in params[:3]] == [3, 2, 2]


def test_steps_that_are_whole_numbers_go_on_as_in_torch() -> None:
    """An optimizer's state of elsewhere may count in integers."""
    p = nn.Parameter(torch.ones(64, 128))
    optimizer = QuantizedStates(torch.optim.AdamW([p]), **FORMATS)
    p.grad = torch.ones_like(p)
    optimizer.step()
    for dtype in (torch.int64, torch.float64):
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
        before = p.detach().clone()
        optimizer.step()
        assert not torch.equal(p, before)
    assert int(optimizer.state[p]["step"]) == 3


def test_parameters_without_an_address_are_stepped_one_by_one() -> None:
    """On a device without memory, as in estimates, all have the address 0."""
    params = [nn.Parameter(torch.ones(64, 128, device="meta")) for _ in range(1100)]
    optimizer = QuantizedStates(torch.optim.AdamW(params), **FORMATS)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [1] * 1100


def test_a_launch_that_fails_leaves_what_the_others_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in bf16 have a launch of their own, which fails here."""
    launched: list[int] = []
    optimizer = _stepped(2, launched, monkeypatch)
    half = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [half]})
    half.grad = torch.ones_like(half)

    def launch(given: adamw.StepLaunch) -> None:
        if given.works[0].p.dtype == torch.bfloat16:
            raise MemoryError

    monkeypatch.setattr(adamw, "step_kernel", launch)
    versions = [p._version for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2, 0]
    assert [p._version > v for p, v in zip(optimizer.param_groups[0]["params"], versions, strict=True)] == [True] * 2


@pytest.mark.starts
def test_a_compiled_step_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    optimizer = _stepped(3, launched, monkeypatch)
    torch.compile(optimizer.step, backend="eager")()
    assert launched == [3, 3]


def test_a_parameter_more_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (_stepped(count, [], monkeypatch) for count in (10, 20))
    assert calls_of(many.step) - calls_of(few.step) <= 10 * CALLS


@pytest.mark.filterwarnings("ignore:masters begin with")
def test_a_master_more_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(count: int) -> MasterWeights:
        layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count)))
        weights = [*lpq.convert(layers, "mxfp8", weights="quantized", include="all").parameters()]
        optimizer = MasterWeights(torch.optim.SGD(weights))
        for weight in weights:
            weight.grad = torch.ones(weight.shape)
        return optimizer

    written: list[int] = []
    monkeypatch.setattr(masters, "write", lambda stored, *_, **__: written.append(len(stored)))
    optimizers = [made(count) for count in (10, 20)]
    for optimizer in optimizers:
        optimizer.step()  # the first one looks at both models
    few, many = (calls_of(optimizer.step) for optimizer in optimizers)
    assert written == [10, 20] * 2
    assert many - few <= 10 * CALLS_OF_MASTERS


def test_the_formats_are_tried_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each group added, they took a minute for a hundred groups."""
    tried: list[int] = []
    states_of = states.states_of
    monkeypatch.setattr(states, "states_of", lambda of: tried.append(len(of.param_groups)) or states_of(of))
    groups = [{"params": [nn.Parameter(torch.ones(64, 128))], "lr": 0.1 * i} for i in range(5)]
    optimizer = QuantizedStates(torch.optim.AdamW(groups), exp_avg="mxfp8")
    assert tried == [5]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 128))]})
    assert tried == [5, 6]
