"""The optimizer's state beside the tensors is judged before anything is overwritten."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opcodes import put
from torch import nn

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError
from lpq.optim import MasterWeights

NAME = "0.weight"
Change = Callable[[dict[str, Any]], object]


def trained() -> tuple[nn.Module, MasterWeights]:
    net = lpq.convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "mxfp8", weights="quantized")
    optimizer = MasterWeights(torch.optim.AdamW(net.parameters(), lr=1e-2))
    net(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    return net, optimizer


def state(value: object, key: str = "master") -> Change:
    return lambda data: data["state"][NAME].update({key: value})


def group(key: str, value: object) -> Change:
    return lambda data: data["groups"][0].update({key: value})


CHANGES: list[tuple[Change, str]] = [
    (state({"lpq.tensor": "model.0.bias"}), r"has 'model\.0\.bias' as optimizer\.state\.0\.weight\.master"),
    (state({"lpq.tensor": "optimizer.state.1.weight.master"}), r"has 'optimizer\.state\.1\.weight\.master' as"),
    (state({"lpq.tensor": [3]}, "exp_avg"), r"has \[3\] as optimizer\.state\.0\.weight\.exp_avg"),
    (state(torch.ones(64, 32)), r"has torch\.float32 as optimizer\.state\.0\.weight\.master"),
    (state(3), "has a master that is no tensor"),
    (lambda data: data["state"].update({NAME: 3}), "'state' of type int, not dict"),
    (lambda data: data["state"].update({5: {}}), "'name' of type int, not str"),
    (lambda data: data.update(state=[]), "'state' of type list, not dict"),
    (lambda data: data.update(groups=[3]), "of group 0 is of type int, not dict"),
    (lambda data: data["groups"][0].pop("options"), "of group 0 lacks 'options'"),
    (group("params", [[], {}]), "of group 0 has something else than names"),
    (group("optimizer", 3), "of group 0 has something else than names"),
    (group("options", {"lr": "fast"}), "has lr='fast', which is no number"),
]


def test_what_is_no_state_of_it_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    path = checkpoint.save(net, tmp_path / "saved", optimizer)
    raw = (path / "extra.pt").read_bytes()
    net, optimizer = trained()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for change, words in CHANGES:
        beside = torch.load(io.BytesIO(raw), weights_only=True)
        change(beside["optimizer"])
        torch.save(beside, buffer := io.BytesIO())
        put(path, "extra.pt", buffer.getvalue())
        with pytest.raises(CheckpointError, match=rf"its optimizer state \(extra\.pt\).* {words}"):
            checkpoint.load(net, path, optimizer)
    put(path, "extra.pt", raw)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    checkpoint.load(net, path, optimizer)  # which has another state than the one above
    assert not all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:masters begin with")
def test_a_state_that_is_loaded_under_inference_mode_is_stepped(tmp_path: Path) -> None:
    """An optimizer that took no step gets its state made, which no later step could write to."""
    (net, optimizer), (other, _) = trained(), trained()
    checkpoint.save(net, tmp_path / "saved", optimizer)
    again = MasterWeights(torch.optim.AdamW(other.parameters(), lr=1e-2))
    with torch.inference_mode():
        checkpoint.load(other, tmp_path / "saved", again)
    for model, each in ((net, optimizer), (other, again)):
        model.zero_grad()
        model(torch.ones(4, 32)).square().sum().backward()
        each.step()
    masters = [[*each.masters.values()] for each in (optimizer, again)]
    assert all(torch.equal(one, two) for one, two in zip(*masters, strict=True))
    assert len(masters[0]) == 2
