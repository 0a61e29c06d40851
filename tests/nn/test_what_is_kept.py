"""A part of a model keeps no other part alive, whatever lpq did with the whole: a stage of a pipeline is cut out of a
model, and the rest is dropped."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_models import Gated
from torch import nn

import lpq
from lpq.checkpoint import load, save
from lpq.optim import MasterWeights

WIDTH = 64
STAGED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 8}, {"match": "*", "recipe": "nvfp4"}]}
Act = Callable[[Any, Path], object]


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Leave what is there already out of the searches for garbage below, each of which would go through a million
    objects of other tests."""
    gc.collect()
    gc.freeze()


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Gated(WIDTH, 2 * WIDTH), Gated(WIDTH, 2 * WIDTH))


def batch() -> Any:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def convert(policy: Any, **options: Any) -> Act:
    return lambda model, _: lpq.convert(model, policy, **options)


def fuse(model: Any, _: Path) -> None:
    lpq.fuse(lpq.convert(model, "mxfp8"))


def calibrate(model: Any, _: Path) -> None:
    lpq.calibrate(lpq.convert(model, "fp8-current"), [batch()], progress=False)


def watch(model: Any, _: Path) -> None:
    watch = lpq.observe.numerics(lpq.convert(model, "mxfp8"), every=1)
    with watch.step():
        model(batch()).sum().backward()
    assert watch.readings()


def replay(model: Any, _: Path) -> None:
    def closure() -> Any:
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    lpq.observe.culprits(lpq.convert(model, "mxfp8"), closure, most=1, replays=1)


def checkpoint(model: Any, path: Path) -> None:
    lpq.convert(model, "mxfp8", weights="high_precision")
    save(model, path / "saved")
    load(model, path / "saved")


def report(model: Any, _: Path) -> None:
    lpq.convert(model, STAGED, steps=10)
    lpq.set_step(model, 8)
    str(lpq.report(model))


ACTS: dict[str, Act] = {
    "fp8-delayed": convert("fp8-delayed"), "high_precision": convert("mxfp8", weights="high_precision"),
    "quantized": convert("mxfp8", weights="quantized"), "fuse": fuse, "calibrate": calibrate, "watch": watch,
    "replay": replay, "checkpoint": checkpoint, "report": report,
}  # fmt: skip


def train(model: Any) -> Any:
    """A step of an optimizer: watchers look at it. Return the optimizer."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if any(isinstance(p, lpq.QuantizedTensor) for p in model.parameters()):
        optimizer = MasterWeights(optimizer, keep=False)
    model(batch()).square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ACTS)
def test_a_part_is_kept_alone(name: str, tmp_path: Path) -> None:
    """And it goes on: it is trained, and copied without the rest."""
    model = made()
    ACTS[name](model, tmp_path)
    train(model)
    part, expected = model[1], model[1](batch())
    gone = [weakref.ref(module) for module in (model, *model[0].modules())]
    del model
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []
    assert torch.equal(part(batch()), expected)
    for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert torch.equal(twin(batch()), expected)
        train(twin)
    train(part)


@pytest.mark.parametrize("name", ["fp8-delayed", "high_precision", "quantized"])
def test_an_optimizer_keeps_the_parameters_alone(name: str, tmp_path: Path) -> None:
    model = made()
    ACTS[name](model, tmp_path)
    optimizer = train(model)
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []
    optimizer.step()
