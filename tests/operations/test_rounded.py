"""A matrix in fp32 that is encoded as one of another dtype: rounded first, by the kernel that reads it if it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal_bytes
from torch import Tensor

import lpq
from lpq import operations
from lpq.kernels import Choice
from lpq.operations import sides
from lpq.registry import KernelSpec

TEXTS = ["fp8", "fp8(scaling=block)", "mxfp8", "nvfp4(rht=true)", "identity", "hybrid(row=mxfp8, col=nvfp4)"]
X = torch.randn(48, 64) * 3


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("measure", [False, True])
def test_it_is_what_encoding_a_rounded_copy_gives(text: str, measure: bool) -> None:
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    expected = operations.quantize(X.bfloat16(), None, row, col, measure=measure)
    with torch.no_grad():
        alone = operations.quantize(X, None, row, col, measure=measure, dtype=torch.bfloat16)
    for got in (alone, operations.quantize(X, None, row, col, measure=measure, dtype=torch.bfloat16)):
        for one, other in zip(got[:2], expected[:2], strict=True):
            assert one is not None
            assert other is not None
            assert one.dtype == torch.bfloat16
            assert equal_bytes(one.tensors(), other.tensors())
        assert equal_bytes(got[2], expected[2])
    exact = operations.quantize(X, None, row, col)[0]
    assert exact is not None
    assert not equal_bytes(exact.tensors(), expected[0].tensors())  # type: ignore[union-attr]


@pytest.mark.parametrize("text", TEXTS)
def test_statistics_are_those_of_a_rounded_copy(text: str) -> None:
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    expected = operations.measure(X.bfloat16(), row, col)
    with torch.no_grad():
        got = operations.measure(X, row, col, dtype=torch.bfloat16)
    assert equal_bytes(got, expected)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("held", [torch.float32, torch.float16])
def test_a_kernel_that_rounds_gets_the_matrix_as_it_is(
    monkeypatch: pytest.MonkeyPatch, rounds: bool, held: torch.dtype
) -> None:
    """From fp32; whoever declares nothing, or holds something else, gets a rounded copy."""
    seen: list[tuple[torch.dtype, Any]] = []

    def kernel(x: Tensor, row: Any, col: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        seen.append((x.dtype, dtype))
        return [x.new_zeros(())]

    spec = KernelSpec(op="measure", impl="nowhere:kernel", backend="torch", rounds=rounds)
    choice = Choice("torch", spec, kernel, ())
    monkeypatch.setattr(sides, "choose", lambda *_: choice)
    quantizer = lpq.quantizer("fp8")
    with torch.no_grad():
        operations.measure(X.to(held), quantizer, quantizer)
        operations.measure(X.to(held), quantizer, quantizer, dtype=held)
        operations.measure(X.to(held), quantizer, quantizer, dtype=torch.bfloat16)
    itself = rounds and held == torch.float32
    assert seen == [(held, None), (held, None), (held, torch.bfloat16) if itself else (torch.bfloat16, None)]
