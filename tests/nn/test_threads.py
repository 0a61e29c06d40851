"""A model that several threads run at once: each step of a race is made here by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq.nn.passes import MOST_CALLS


class Raced(dict[Any, Any]):
    """A dict from which another thread takes the first key as soon as this one has found it."""

    def __iter__(self) -> Iterator[Any]:
        first = next(super().__iter__())
        self.pop(first)
        yield first


def test_the_oldest_call_may_be_gone_already() -> None:
    model = lpq.convert(nn.Linear(64, 32), "mxfp8")
    batches = [torch.randn(rows, 64) for rows in range(1, MOST_CALLS + 3)]
    expected = [model(x) for x in batches]
    epoch, calls = model.passes.calls
    assert len(calls) == MOST_CALLS
    model.passes.calls = (epoch, Raced(calls))
    assert torch.equal(model(batches[0]), expected[0])  # its call was dropped for later ones
    assert len(model.passes.calls[1]) == MOST_CALLS


def test_an_input_that_dies_may_have_been_dropped_already(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    model = lpq.convert(nn.Linear(64, 32), "mxfp8")

    def known(x: Tensor) -> Any:
        with torch.no_grad():
            model(x)
        return [*model.model.inputs.values()][-1]

    x = torch.randn(4, 64)
    in_a_loop_of_another_thread = known(x)
    model.model.inputs.clear()
    del x
    assert in_a_loop_of_another_thread() is None
    assert not said
