"""Declarations that are properties are computed once for each quantizer: then compiled layers read constants."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import compiled, plainly, step
from support.plugins import FormatPlugin
from support.small_models import converted
from torch import Tensor

import lpq
from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage
from lpq.nn import GroupedLinear

CALLS = count()


class TensStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("step", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.step


class Beside:
    """A class that a third party shares between formats, which knows nothing of lpq."""

    @property
    def transposable(self) -> bool:
        return bool(super().transposable)  # type: ignore[misc]

    @cached_property
    def fresh(self) -> str:
        return str(super().fresh)  # type: ignore[misc]


@dataclass(frozen=True)
class TensQuantizer(Beside, Quantizer):  # type: ignore[misc]
    static: bool = False
    moving: bool = False

    @property
    def stats(self) -> tuple[Stat, ...]:
        next(CALLS)
        return (*super().stats, Stat("largest"))

    @property
    def state(self) -> tuple[StateBuffer, ...]:
        return (*super().state, StateBuffer("largest")) if self.moving else super().state

    @property
    def moves(self) -> bool:
        return super().moves and self.moving

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"largest": x.float().abs().amax()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        step = torch.where(stats["largest"] > 0, stats["largest"] / 127, 1.0)
        return TensStorage(data=(x.float() / step).round().clamp(-127, 127).to(torch.int8), step=step)

    def recall(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        return {"largest": state["largest"]} if self.moving else super().recall(state)

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        state["largest"].copy_(stats["largest"])

    def inherited(self) -> tuple[StateBuffer, ...]:
        return super().state


@pytest.fixture(autouse=True)
def tens(register: Callable[..., object]) -> None:
    register(FormatPlugin("tens", TensQuantizer, TensStorage), name="tens")


@pytest.mark.parametrize("options", ["", "(moving=true)", "(static=true)"])
def test_a_compiled_layer_takes_declarations_that_call_super(options: str) -> None:
    x, run = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), [plainly, compiled]
    layers = [converted(f"x=tens{options}, w=tens{options}, dy=tens", 64, 48)[0] for _ in run]
    for layer in layers:
        for value in layer.static_values().values():
            value.fill_(3.0)
    for _ in range(2):
        outcomes = [step(layer, x, how) for layer, how in zip(layers, run, strict=True)]
        assert equal(*outcomes)
    assert not equal(outcomes[0][:1], step(converted("bf16", 64, 48)[0], x)[:1])


def test_compiled_groups_take_them() -> None:
    x, ends = torch.randn(8, 64), torch.tensor([3, 8], dtype=torch.int32)
    layer = GroupedLinear(2, 64, 48, recipe="x=tens, w=tens, dy=tens")
    outcomes = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y: Tensor = run(x, ends)
        layer.zero_grad()
        y.square().sum().backward()
        outcomes.append([y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(outcomes[0]) > 1
    assert equal(*outcomes)


def test_each_is_computed_once_and_super_goes_on_to_its_own_class() -> None:
    quantizer: Any = lpq.quantizer("tens(moving=true)")
    before = next(CALLS)
    assert [stat.name for stat in quantizer.stats] == ["largest"]
    assert quantizer.stats is quantizer.stats
    assert quantizer.transposable is False
    assert next(CALLS) == before + 1
    assert [buffer.name for buffer in quantizer.state] == ["largest"]
    assert quantizer.inherited() == ()  # and not the value that the object has
    assert quantizer.moves


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_are_equal_and_other_options_are_declared_anew(again: Callable[[Any], Any]) -> None:
    quantizer: Any = lpq.quantizer("fp8(scaling=delayed, history=3)")
    made = again(quantizer)
    assert (made, hash(made), made.text) == (quantizer, hash(quantizer), quantizer.text)
    assert made.state == quantizer.state
    unmade: Any = type(quantizer)(scaling="delayed", history=3)  # nothing is computed yet
    assert (unmade, hash(unmade)) == (quantizer, hash(quantizer))
    assert [buffer.shape for buffer in replace(made, history=5).state] == [(5,), ()]
    assert replace(made, scaling="row").state == ()
