"""Two operands of a tensor: encoded one after the other where no kernel takes both, of a matrix that is rounded first,
and derived from each other in given memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal_bytes, expect_bytes
from torch import Tensor

import lpq
from lpq import operations
from lpq.kernels import Choice
from lpq.operations import sides
from lpq.operations.derived_operands import Derived, bind_derive_into, derive_col
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference
from lpq.registry import KernelSpec

HYBRIDS = [
    "hybrid(row=mxfp8, col=nvfp4(rht=true, stochastic=true))",
    "hybrid(row=fp8(scaling=row), col=mxfp8)",
    "hybrid(row=fp8(scaling=delayed), col=fp8(scaling=delayed, dtype=e5m2))",
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """List the questions to the kernel table."""
    questions: list[tuple[str, tuple[str, ...]]] = []
    choose = sides.choose

    def listen(op: str, operands: tuple[str, ...], device: torch.device) -> Any:
        questions.append((op, operands))
        return choose(op, operands, device)

    monkeypatch.setattr(sides, "choose", listen)
    return questions


def test_each_operand_has_a_kernel_of_its_own(asked: list[tuple[str, tuple[str, ...]]]) -> None:
    lpq.quantizer("hybrid(row=mxfp8, col=nvfp4)").quantize(torch.randn(32, 48))
    assert [operands for op, operands in asked if op == "quantize"] == [("mxfp8", "nvfp4"), ("mxfp8",), ("nvfp4",)]


def test_an_operand_that_follows_from_the_other_is_not_encoded_again(asked: list[tuple[str, tuple[str, ...]]]) -> None:
    lpq.quantizer("fp8").quantize(torch.randn(32, 48))
    assert [operands for op, operands in asked if op == "quantize"] == [("fp8", "fp8")]


@pytest.mark.parametrize("text", HYBRIDS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("measure", [False, True])
def test_the_result_is_that_of_both_at_once(text: str, given: bool, measure: bool) -> None:
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x, seed = torch.randn(33, 48), torch.tensor(5)
    stats = measure_reference(x * 0.5, row, col) if given else []
    expected = quantize_reference(x, stats, row, col, seed, 16, measure)
    got = torch.ops.lpq.quantize(x, stats, row.text, col.text, seed, 16, measure)
    assert equal_bytes(got, expected)


def test_measuring_is_split_likewise(asked: list[tuple[str, tuple[str, ...]]]) -> None:
    quantizer = lpq.quantizer("hybrid(row=fp8, col=mxfp8)")
    row, col = quantizer.side("row"), quantizer.side("col")
    x = torch.randn(64, 96)
    got = operations.measure(x, row, col)
    assert [operands for _, operands in asked] == [("fp8", "mxfp8"), ("fp8",), ("mxfp8",)]
    assert equal_bytes(got, measure_reference(x, row, col))


# ------------------------------------------------------------------------------------------ rounded first

ROUNDED = ["fp8", "fp8(scaling=block)", "mxfp8", "nvfp4(rht=true)", "identity", "hybrid(row=mxfp8, col=nvfp4)"]
X = torch.randn(48, 64) * 3


@pytest.mark.parametrize("text", ROUNDED)
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


@pytest.mark.parametrize("text", ROUNDED)
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


# ------------------------------------------------------------------------------------------ derived

DERIVED = (
    "fp8", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)", "hybrid(row=fp8, col=nvfp4, col_source=row)",
    "hybrid(row=fp8(scaling=row), col=mxfp8, col_source=row)", "identity",
)  # fmt: skip


def poisoned(buffer: Tensor) -> Tensor:
    """Memory like a buffer's, with another value in each byte."""
    return (buffer.view(-1).view(torch.uint8) ^ 0xA5).view(buffer.dtype).view(buffer.shape)


@pytest.mark.parametrize("text", DERIVED)
@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (0, 16), (16, 0), (3, 32, 48)])
def test_they_are_those_of_derive_col(text: str, shape: tuple[int, ...]) -> None:
    quantizer = lpq.quantizer(text)
    row = quantizer.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1))).operand("row")
    wanted = [buffer.contiguous() for buffer in derive_col(quantizer, row).tensors()]
    out = [poisoned(buffer) for buffer in wanted]
    (derive,) = bind_derive_into([Derived(quantizer, row, out)], torch.device("cpu"))
    derive()
    expect_bytes(out, wanted, f"{text}, {shape}")
