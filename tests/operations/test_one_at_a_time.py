"""Two operands that no kernel takes together are encoded one after the other, each by what serves it best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal_bytes

import lpq
from lpq import operations
from lpq.operations import sides
from lpq.operations.measuring import measure_reference
from lpq.operations.quantizing import quantize_reference

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
    for a, b in zip(got, measure_reference(x, row, col), strict=True):
        assert torch.equal(a, b)
