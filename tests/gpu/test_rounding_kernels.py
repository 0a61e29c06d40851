"""Kernels that round an fp32 matrix as they read it do what they do for a rounded copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lpq
from lpq import operations
from lpq.kernels import choose

TEXTS = [
    "fp8", "fp8(dtype=e5m2)", "fp8(scaling=row)", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "mxfp8",
    "mxfp4", "nvfp4", "nvfp4(block=16x16)", "nvfp4(rht=true)",
]  # fmt: skip
ODD = [0.0, -0.0, 3.3895e38, -torch.inf, torch.nan, 1e-40, 65520.0, 65519.9]
"""Numbers that round to zero, to the largest numbers and to infinity."""


@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    offset=st.integers(0, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    sides=st.sampled_from([(True, False), (False, True), (True, True)]),
    odd=st.booleans(),
    measure=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rounding_on_the_way(
    text: str,
    rows: int,
    cols: int,
    offset: int,
    dtype: torch.dtype,
    sides: tuple[bool, bool],
    odd: bool,
    measure: bool,
    seed: int,
) -> None:
    pytest.importorskip("cuda.core")
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows * cols + offset, device="cuda", generator=g)[offset:].view(rows, cols)
    if odd:
        places = torch.randint(0, x.numel(), (len(ODD),), device="cuda", generator=g)
        x.view(-1)[places] = torch.tensor(ODD, device="cuda")
    quantizer = lpq.quantizer(text)
    row, col = (quantizer.side(d) if wanted else None for d, wanted in zip(("row", "col"), sides, strict=True))  # type: ignore[arg-type]
    with torch.no_grad():
        assert choose("quantize", tuple(s.text for s in (row, col) if s), x.device).kernel.rounds  # type: ignore[union-attr]
        expected = operations.quantize(x.to(dtype), None, row, col, measure=measure)
        stats = operations.measure(x.to(dtype), row, col)
        got = operations.quantize(x, None, row, col, measure=measure, dtype=dtype)
        measured = operations.measure(x, row, col, dtype=dtype)
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == dtype
            for a, b in zip(one.tensors(), other.tensors(), strict=True):
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    for a, b in zip([*got[2], *measured], [*expected[2], *stats], strict=True):
        assert torch.equal(a.view(-1).view(torch.int32), b.view(-1).view(torch.int32))
