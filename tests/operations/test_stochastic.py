"""Whether a quantizer rounds with random bits is asked of both its sides, in one place; and what it may round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lpq
from lpq.operations.derived_operands import rounds_stochastically


@pytest.mark.parametrize(
    ("text", "expected"), [
        ("mxfp8", False), ("nvfp4(rht=true)", False), ("nvfp4(stochastic=true)", True),
        ("hybrid(row=mxfp8, col=nvfp4(stochastic=true))", True),
        ("hybrid(row=nvfp4(stochastic=true), col=mxfp8)", True), ("hybrid(row=mxfp8, col=fp8)", False),
    ]
)  # fmt: skip
def test_either_side_counts(text: str, expected: bool) -> None:
    assert rounds_stochastically(lpq.quantizer(text)) is expected


def test_nobody_else_asks_both_sides() -> None:
    folder = Path(lpq.__file__).parent
    found = [p for p in folder.rglob("*.py") if re.search(r"\.side\([^)]*\)\.stochastic", p.read_text())]
    assert found == [folder / "operations" / "derived_operands.py"]


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4(stochastic=true)"])
def test_a_stored_tensor_may_be_rounded_again(text: str) -> None:
    stored = lpq.quantizer(text).quantize(torch.randn(32, 64), seed=1)
    again = lpq.quantizer("nvfp4(stochastic=true)")
    seed = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    found = again.quantize(stored)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, generator=seed)[0]
    assert torch.equal(found.dequantize(), again.quantize(stored.dequantize(), seed=drawn).dequantize())
