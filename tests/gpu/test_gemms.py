"""Products of encoded operands on a GPU equal the reference's up to the order of their sums."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.core import operations
from lpq.ops import choose
from lpq.testing.expect import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAIRS = [
    ("fp8", "fp8"),
    ("fp8(dtype=e5m2)", "fp8"),
    ("fp8", "fp8(scaling=delayed, dtype=e5m2)"),
    ("fp8(scaling=row)", "fp8(scaling=row)"),
    ("fp8(scaling=block)", "fp8(scaling=block, block=128x128)"),
    ("fp8(scaling=block)", "fp8(scaling=block)"),
    ("fp8(scaling=block, block=128x128)", "fp8(scaling=block)"),
    ("fp8(dtype=e5m2)", "fp8(dtype=e5m2)"),
    ("fp8", "fp8(scaling=row)"),
    ("fp8(scaling=row)", "fp8(scaling=block, block=128x128)"),
    ("fp8(scaling=block, block=128x128)", "fp8(scaling=block, block=128x128)"),
    ("mxfp8", "mxfp8(dtype=e5m2)"),
    ("nvfp4", "nvfp4(block=16x16)"),
    ("nvfp4(rht=true)", "nvfp4(rht=true)"),
    ("nvfp4(rht=true, stochastic=true)", "nvfp4(rht=true)"),
    ("nvfp4", "nvfp4(rht=true)"),
]
SHAPES = [
    (256, 512, 384),
    (32, 256, 512),
    (48, 128, 64),
    (17, 256, 32),
    (128, 640, 128),
    (33, 50, 20),
    (16, 16, 16),
    (1, 1, 1),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_products(a: str, b: str, dtype: torch.dtype, fast: bool) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    for rows, inner, cols in SHAPES:
        x = torch.randn(rows, inner, device="cuda", generator=g)
        w = torch.randn(cols, inner, device="cuda", generator=g) * torch.linspace(0.1, 10, cols, device="cuda")[:, None]
        bias = torch.randn(cols, device="cuda", generator=g) * 10
        left = lpq.quantizer(a).quantize(x.t(), row=False).col  # wgrad's operands can be rotated
        right = lpq.quantizer(b).quantize(w.t(), row=False).col
        assert left is not None
        assert right is not None
        for added in (None, bias, bias.to(dtype)):
            got = operations.gemm(left, right, bias=added, dtype=dtype, fast_accumulate=fast)
            expected = operations.gemm_reference(left, right, added, torch.float32)
            assert got.dtype == dtype
            assert relative_error(got, expected) < (1e-2 if fast else 4e-3), (rows, inner, cols)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_scaled_matmul_serves(a: str, b: str) -> None:
    choice = choose("gemm", (lpq.quantizer(a).text, lpq.quantizer(b).text), torch.device("cuda", 0))
    assert choice.backend == "torch", choice.rejected


def test_what_no_scaled_matmul_takes_says_so() -> None:
    choice = choose("gemm", ("fp8(dtype=e5m2)", "fp8(dtype=e5m2)"), torch.device("cuda", 0))
    assert choice.kernel is not None
    assert choice.kernel.impl == "lpq_fp8.gemm:gemm_in_bf16"
    assert "E5M2 by E5M2" in choice.rejected[0][1]


def test_scales_of_blocks_that_are_not_exact_in_bf16_are_left_to_the_reference() -> None:
    odd = "fp8(scaling=block, block=128x128, pow2=false)"
    choice = choose("gemm", (lpq.quantizer(odd).text, lpq.quantizer(odd).text), torch.device("cuda", 0))
    assert choice.backend == "reference"
    assert "not exact in bf16" in choice.rejected[1][1]
