"""Whether a quantizer rounds with random bits is asked of both its sides, in one place; and what it may round."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lpq
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import EncoderSpec
from lpq.operations.part_encoders import placed
from lpq.tensor.observed import Observed


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


def test_columns_in_several_chunks_have_no_place() -> None:
    """Nothing divides columns so. The random bits of the first chunk would have been drawn for all of them."""
    spec = EncoderSpec(lpq.quantizer("nvfp4(stochastic=true)"), (32, 64), torch.float32, torch.device("cpu"))
    cut = Cut(1, rank=1, ranks=2, size=32)
    own = placed(spec, cut)
    assert own is not None
    assert own.across == 32
    assert cut._replace(dim=0, chunks_per_rank=2).place(1) == 96
    seen = Observed(layer=torch.nn.Identity(), name="x", given=torch.ones(32, 64), quantizer=spec.quantizer, cut=cut)
    assert seen.place == (0, 32)
    several = cut._replace(chunks_per_rank=2)
    for ask in (lambda: placed(spec, several), lambda: replace(seen, cut=several).place):
        with pytest.raises(ValueError, match="a rank's columns lie side by side, in one chunk"):
            ask()
