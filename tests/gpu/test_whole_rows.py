"""NVFP4 with an amax for each row, on a GPU: the bytes of the reference, for rows that a block of threads holds, and
for longer ones, which are read twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lpq
from lpq import operations
from lpq.operations.references import quantize_reference
from lpq.testing.comparing import Poisoned
from lpq.testing.expect import same

TEXTS = [
    "nvfp4(scaling=row)",
    "nvfp4(scaling=row, search=four_over_six, norm=256)",
    "nvfp4(scaling=row, search=four_over_six, error=mae)",
    "nvfp4(scaling=row, stochastic=unbiased)",
]
WIDTHS = (16, 48, 250, 1024, 2048, 2304, 4096, 6144, 8192, 11008, 16384)
HEIGHTS = (1, 8, 37, 128)
"""Blocks of threads take 8 to 64 rows: some of these are whole blocks of them."""


def inputs(rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(rows + cols)
    normal = torch.randn(rows, cols, device="cuda", generator=g)
    wide = normal * torch.exp2(torch.randint(-30, 30, (rows, cols), device="cuda", generator=g).float())
    odd = normal.clone()
    odd[rows // 2], odd[0, cols // 2], odd[-1, cols - 1] = 0, torch.inf, torch.nan
    return [x.to(dtype) for x in (normal, wide, odd)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("text", TEXTS)
def test_row_operands_equal_the_reference(
    text: str, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    q, seed = lpq.quantizer(text), torch.tensor(-(7 << 40) + 12345, device="cuda")
    for rows in HEIGHTS:
        for x in inputs(rows, cols, dtype):
            for offset, measure in ((0, False), (128, True)):
                expected = quantize_reference(x.cpu(), [], q, None, seed.cpu(), offset, measure)
                with Poisoned():  # type: ignore[no-untyped-call]
                    of_row, _, found = operations.quantizing.quantized(x, None, q, None, seed, offset, measure=measure)
                for i, (got, wanted) in enumerate(zip([*of_row, *found], expected, strict=True)):
                    same(got.cpu(), wanted, f"{text}, {rows}x{cols}, {dtype}, output {i}")
