"""Earlier names of functions and methods that pages named: each warns, and does what the name of now does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparing import equal

import lpq
from lpq.core import QuantizedTensor
from lpq.formats.format import Direction
from lpq.operations import binding
from lpq.operations.binding import Operand, operand_like
from lpq.registry.former_names import former

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def wrapped() -> Any:
    row = lpq.quantizer("mxfp8").quantize(X).row
    assert row is not None
    return type(row).wrap(row.tensors(), row.quantizer, row.shape, row.dtype)


def over_buffers() -> Any:
    row = lpq.quantizer("mxfp8").quantize(X).row
    assert row is not None
    direction: Direction = "row"
    sides = [(direction, row.quantizer, row.shape, row.dtype)]
    return QuantizedTensor.over(row.tensors(), sides, row.quantizer, row.shape, row.dtype).row


def over_an_operand() -> Any:
    row = lpq.quantizer("mxfp8").quantize(X).row
    assert row is not None
    return Operand.over(operand_like(row), row.tensors())


@pytest.mark.parametrize(
    ("function", "old", "now"),
    [
        (wrapped, "Storage.wrap", "from_tensors"), (over_buffers, "QuantizedTensor.over", "from_tensors"),
        (over_an_operand, "Operand.over", "storage"),
    ],
)  # fmt: skip
def test_a_former_method_warns_and_works(function: Callable[[], Any], old: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^{old} will be removed in lpq 0\.2: call {now}$") as warned:
        made = function()
    assert [one.filename for one in warned] == [__file__]
    expected = lpq.quantizer("mxfp8").quantize(X).row
    assert expected is not None
    assert type(made) is type(expected)
    assert equal(made.tensors(), expected.tensors())


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("unbound", "cached_by_shape"), ("unbound_product", "cached_product"),
        ("unbound_transpose", "cached_transpose"),
    ],
)  # fmt: skip
def test_a_former_function_warns_and_works(old: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^lpq\.operations\.binding\.{old} will be .*: call {now}$"):
        made = getattr(binding, old)(lambda *task: None)
    assert made.__name__ == getattr(binding, now)(lambda *task: None).__name__


def test_a_subclass_makes_itself_by_a_former_class_method() -> None:
    class Base:
        @classmethod
        def make(cls) -> Any:
            """Make one."""
            return cls()

        build = former("Base.build", make)

    class Derived(Base):
        pass

    with pytest.warns(DeprecationWarning, match=r"^Base\.build"):
        assert type(Derived.build()) is Derived
    assert Base.build.__doc__ == "The former name of ``make``."
