"""Amaxes that were calibrated and then frozen: training follows them, nothing moves them, and checkpoints keep them.

They are the state of a third party's format, of each operand of each layer. Saved on 2 ranks, loaded on 1 and on 2;
``test_resharding`` goes by way of 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frozen_format
import pytest
import torch
import trained
from operands import expected, gathered
from ranks import spawn
from sharded import How, built, optimizer_for, step, whole
from support.comparing import equal, equal_states
from torch import Tensor, nn

import lpq
from lpq import checkpoint
from lpq.core import encode_operands, gemm

RECIPE = {"rules": [{"match": "*", "recipe": "x=frozen(), w=frozen(), dy=frozen()"}]}
RUNS: dict[str, dict[str, Any]] = {
    "gathered": {"recipe": RECIPE, "blocks": 1},
    "masters": {"recipe": RECIPE, "weights": "quantized", "ranks": 2, "blocks": 1},
}
AMAXES = {"x": 2.0, "w": 0.05, "dy": 1e-4}
"""Of this size. They are smaller than what is there, so that each of them cuts something off."""


def _frozen(net: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in net.named_buffers() if name.endswith("_amax")}


def _value(number: int, name: str) -> float:
    """Of the buffer with this number and name: no two are equal."""
    return AMAXES[name.rpartition(".")[2].partition("_")[0]] * (1 + number / 64)


def _freeze(net: nn.Module) -> None:
    found = _frozen(net)
    assert len(found) == 2 * 6, "two layers, each with x, w and dy in two directions"
    for number, (name, buffer) in enumerate(found.items()):
        buffer.fill_(_value(number, name))
    _check_frozen(net)


def _check_frozen(net: nn.Module) -> None:
    found = _frozen(net)
    values = {name: torch.tensor(_value(number, name)) for number, name in enumerate(found)}
    assert len({value.item() for value in values.values()}) == 12
    for name, value in values.items():
        assert torch.equal(found[name], value), name


def _states(layer: nn.Module, tensor: str) -> dict[str, Tensor]:
    return {f"{d}_amax": getattr(layer, f"{tensor}_{d}_amax").clone() for d in ("row", "col")}


def _weights_follow_them(path: Path) -> None:
    """Gathered weights are encoded with the frozen amax of each operand."""
    net = built(How(**RUNS["gathered"], width=128))
    checkpoint.load(net, path / "gathered")
    _check_frozen(net)
    values = {name: whole(p.detach()).clone() for name, p in net.named_parameters()}
    states = {name: _states(layer, "w") for name, layer in net.named_modules() if isinstance(layer, lpq.nn.Linear)}
    found = gathered(net, torch.randn(32, 128))
    assert len(found) == 2 * len(states) == 4
    for (name, when), seen in found.items():
        value, state, direction = values[f"{name}.weight"], states[name], "row" if when == "forward" else "col"
        assert equal_states(seen, expected("frozen", value, direction, state)), (name, when)
        other = {**state, f"{direction}_amax": state[f"{direction}_amax"] * 2}
        assert not equal_states(seen, expected("frozen", value, direction, other)), (name, when)
        assert not equal_states(seen, expected("frozen", value, direction)), "they are not those of the data"
    _check_frozen(net)


def _on_two(rank: int, folder: Path) -> None:
    frozen_format.register()
    trained.uninterrupted(folder, "two", RUNS, _freeze)


def _loads_them(path: Path, **options: Any) -> None:
    for name, run in RUNS.items():
        how = How(**run, width=128, **options)
        net = built(how)
        assert not any(buffer.any() for buffer in _frozen(net).values())
        checkpoint.load(net, path / name)
        _check_frozen(net)
        step(net, optimizer_for(how, net), 9, how)
        _check_frozen(net)


def _on_two_again(rank: int, folder: Path) -> None:
    frozen_format.register()
    trained.resumed(folder, "one", None, RUNS)
    _weights_follow_them(folder / "two")
    _loads_them(folder / "one")


@pytest.fixture
def frozen() -> Iterator[None]:
    """The format, in a process whose sums are split as those of the other processes are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    frozen_format.register()
    yield
    lpq.registry.refresh()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("frozen")
def test_two_one_two(tmp_path: Path) -> None:
    """To the bit, and a run that goes on is the run that was never interrupted."""
    spawn(_on_two, 2, tmp_path)
    trained.resumed(tmp_path, "two", "one", RUNS, shard=False)
    _loads_them(tmp_path / "one", shard=False)
    spawn(_on_two_again, 2, tmp_path)


def _products(layer: lpq.nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


@pytest.mark.usefixtures("frozen")
def test_every_operand_follows_its_own_amax() -> None:
    """One for each of x, w and dy in each direction; and each changes the product that it belongs to, alone."""
    torch.manual_seed(0)
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    layer = lpq.nn.Linear(64, 48, bias=False, recipe="x=frozen(), w=frozen(), dy=frozen()")
    data = {"x": x, "w": layer.weight.detach(), "dy": dy}
    found = dict(layer.named_buffers())
    assert set(found) == {f"{tensor}_{d}_amax" for tensor in data for d in ("row", "col")}
    for number, (name, buffer) in enumerate(found.items()):
        buffer.fill_(data[name.partition("_")[0]].abs().max() * (0.5 + number / 64))
    before = {name: buffer.clone() for name, buffer in found.items()}
    quantizer = lpq.quantizer("frozen")
    row, col = {}, {}
    for tensor, value in data.items():
        encoded = encode_operands(quantizer, value, state=_states(layer, tensor))
        measured = encode_operands(quantizer, value)
        assert encoded.row is not None
        assert encoded.col is not None
        assert measured.row is not None
        assert not torch.equal(encoded.row.data, measured.row.data), "it is not the amax of the data"
        row[tensor], col[tensor] = encoded.row, encoded.col
    seen = _products(layer, x, dy)
    assert torch.equal(seen["y"], gemm(row["x"], row["w"], dtype=torch.float32))
    assert torch.equal(seen["dx"], gemm(row["dy"], col["w"], dtype=torch.float32))
    assert torch.equal(seen["dw"], gemm(col["dy"], col["x"], dtype=torch.float32))
    uses = {"y": ("x_row", "w_row"), "dx": ("dy_row", "w_col"), "dw": ("dy_col", "x_col")}
    for name, buffer in found.items():
        assert torch.equal(buffer, before[name]), "a step read it and left it as it was"
        buffer.mul_(2)
        others = _products(layer, x, dy)
        changed = {product for product in uses if not torch.equal(others[product], seen[product])}
        assert changed == {product for product, names in uses.items() if name.removesuffix("_amax") in names}
        buffer.copy_(before[name])
    assert equal(seen.values(), _products(layer, x, dy).values())


@pytest.mark.usefixtures("frozen")
def test_a_stored_weight_is_encoded_with_its_own_statistics() -> None:
    """The format's memory is kept, and serves x, dy and gathered weights, which are quantized at every step."""
    net = lpq.convert(nn.Sequential(nn.Linear(64, 48)), RECIPE, weights="quantized")
    for buffer in _frozen(net).values():
        buffer.fill_(0.5)
    value = torch.randn(48, 64)
    with torch.no_grad():
        net[0].weight.copy_(value)
    measured = encode_operands(lpq.quantizer("frozen"), value)
    assert measured.row is not None
    assert torch.equal(net[0].weight.row.data, measured.row.data)
    assert all(torch.equal(buffer, torch.tensor(0.5)) for buffer in _frozen(net).values())
