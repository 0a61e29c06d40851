"""Norms: one kernel finds what rows have in common, and another computes and encodes. A CPU imitates the GPU."""

from __future__ import annotations

import imitated
import pytest
import torch
from test_producers_imitated import CPU, check, launched

from lpq.operations.norms import NormKind, bind_rows, norm_source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not imitated.found(), reason="needs g++, which compiles CUDA sources for a CPU"),
]
__all__ = ["launched"]
RMS = [NormKind(1e-6), NormKind(1e-6, rounds=True), NormKind(1e-6, offset=True)]
LAYER = NormKind(1e-5, centers=True)


@pytest.mark.parametrize(("norm", "biased"), [*((norm, False) for norm in RMS), (LAYER, False), (LAYER, True)])
def test_elements_and_operands(norm: NormKind, biased: bool) -> None:
    check(norm_source(norm, biased), ["hybrid(row=mxfp8, col=fp8)"], (37, 136), torch.bfloat16)


@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows(norm: NormKind, dtype: torch.dtype, launched: list[str]) -> None:
    torch.manual_seed(0)
    for shape in ((9, 8), (16, 1032), (1, 2048)):
        x = (torch.randn(shape) + 1).to(dtype)
        found, expected = bind_rows(norm, shape, dtype, CPU)(x), norm.rows(x)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)
    assert launched == ["norm_rows"] * 3
