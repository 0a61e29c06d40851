"""Products of encoded operands on a GPU equal the reference's up to the order of their sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.comparing import equal

import lpq
from lpq import operations
from lpq.core import Storage
from lpq.kernels import choose
from lpq.operations.binding import Product, operand_like
from lpq.operations.bound import bind_product, bind_writing
from lpq.testing.expect import relative_error

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
    ("mxfp4", "mxfp4(scale=even)"),
    ("mxfp4(rht=true)", "nvfp4(rht=true)"),
    ("mxfp8", "mxfp4(scale=ceil, stochastic=true)"),
    ("fp8", "mxfp8"),
    ("mxfp8(dtype=e5m2)", "fp8(scaling=row)"),
    ("fp8(scaling=block, block=128x128)", "nvfp4"),
    ("nvfp4(block=16x16)", "fp8(scaling=row)"),
    ("nvfp4(stochastic=true)", "mxfp8"),
    ("identity(dtype=bfloat16)", "nvfp4"),
]
REFERENCE = ("nvfp4", "nvfp4(rht=true)")
"""Rotated differently, they are left to the reference."""
EXACT = [pair for pair in PAIRS if not all(q.startswith("fp8") for q in pair) and pair != REFERENCE]
SHAPES = [
    (256, 512, 384), (32, 256, 512), (48, 128, 64), (17, 256, 32), (128, 640, 128), (33, 50, 20), (20, 144, 16),
    (130, 400, 48), (16, 16, 16), (1, 1, 1),
]  # fmt: skip


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


def operands(a: str, b: str, rows: int, inner: int, cols: int) -> tuple[Storage, Storage]:
    g = torch.Generator("cuda").manual_seed(1)
    x, w = (torch.randn(inner, size, device="cuda", generator=g) for size in (rows, cols))
    left, right = lpq.quantizer(a).quantize(x, row=False).col, lpq.quantizer(b).quantize(w, row=False).col
    assert left is not None
    assert right is not None
    return left, right


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_in_rows_of_a_matrix_equals_one_by_itself(
    a: str, b: str, with_bias: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, and the other rows stay as they are."""
    for rows, inner, cols in ((256, 512, 384), (128, 640, 128), (33, 64, 32), (20, 144, 16)):
        left, right = operands(a, b, rows, inner, cols)
        bias = torch.randn(cols, device="cuda") if with_bias else None
        product = Product(operand_like(left), operand_like(right), dtype, left.device)
        expected = bind_product(product)(left.tensors(), right.tensors(), bias)
        y = torch.full((3 * rows, cols), torch.nan, device="cuda", dtype=dtype)
        bind_writing(product)(left.tensors(), right.tensors(), bias, y[rows : 2 * rows])
        assert torch.equal(y[rows : 2 * rows], expected), (rows, inner, cols)
        assert y[:rows].isnan().all()
        assert y[2 * rows :].isnan().all()


@pytest.mark.parametrize(("a", "b"), [("fp8", "fp8"), ("fp8(scaling=row)", "fp8(scaling=row)"), ("mxfp8", "mxfp8"),
                                      ("fp8(scaling=block)", "fp8(scaling=block)"), ("nvfp4", "nvfp4")])  # fmt: skip
def test_products_are_written_to_rows_without_a_copy(a: str, b: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's scaled matmuls, which serve other GPUs, write to new memory")
    left, right = operands(a, b, 256, 512, 384)
    multiply: Any = bind_product(Product(operand_like(left), operand_like(right), torch.bfloat16, left.device))
    y = torch.empty(256, 384, device="cuda", dtype=torch.bfloat16)
    assert multiply(left.tensors(), right.tensors(), None, out=y) is y


@pytest.mark.parametrize(("a", "b"), EXACT)
def test_operands_are_not_rounded_on_their_way_into_a_product(a: str, b: str) -> None:
    """In fp32 the error is that of the sums. Were operands rounded to bf16, it would be a thousand times as large."""
    shapes = (256, 512, 384), (17, 256, 33), (200, 50, 8), (200, 56, 8), (5, 1040, 3), (31, 64, 24), (64, 8192, 128)
    for rows, inner, cols in shapes:
        left, right = operands(a, b, rows, inner, cols)
        bias = torch.randn(cols, device="cuda").bfloat16()
        exactly = left.decode().double() @ right.decode().double().t()
        rounded = left.decode().bfloat16().double() @ right.decode().bfloat16().double().t()
        for backend in ("cuda,torch,reference", "triton,torch,reference"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LPQ_KERNELS", backend)
                for added in (None, bias):
                    got = operations.gemm(left, right, bias=added, dtype=torch.float32)
                    expected = exactly if added is None else exactly + added
                    assert relative_error(got, expected) < 3e-6, (backend, rows, inner, cols)
                    narrow = operations.gemm(left, right, bias=added, dtype=torch.bfloat16)
                    off = (narrow != expected.bfloat16()).float().mean()  # rounded once, to the nearest
                    assert off < (0.01 if narrow.numel() > 1000 else 0.1), (backend, rows, inner, cols, added is None)
        if a.startswith("nvfp4") or b.startswith("nvfp4"):
            assert relative_error(rounded, exactly) > 1e-4


def test_what_cannot_be_represented_in_bf16_before_its_factor_can_be_after() -> None:
    """Amaxes whose product alone would be subnormal, and a sum that is not."""
    left, right = operands("nvfp4", "nvfp4", 64, 4096, 32)
    left.amax.fill_(1e-18)
    right.amax.fill_(1e-19)
    exactly = left.decode().double() @ right.decode().double().t()
    for dtype, bound in ((torch.float32, 3e-6), (torch.bfloat16, 3e-3)):
        assert relative_error(operations.gemm(left, right, dtype=dtype).double() * 1e36, exactly * 1e36) < bound


def test_a_nan_in_a_scale_or_an_amax_is_not_lost() -> None:
    for value in (torch.nan, torch.inf):
        left, right = operands("nvfp4", "mxfp8", 64, 256, 32)
        left.amax.fill_(value)
        assert not operations.gemm(left, right).isfinite().any()


def test_a_product_with_a_factor_waits_for_nothing_and_can_be_captured() -> None:
    left, right = operands("nvfp4", "nvfp4(block=16x16)", 256, 512, 128)
    bias = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    expected = operations.gemm(left, right, bias=bias, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operations.gemm(left, right, bias=bias, dtype=torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        captured = operations.gemm(left, right, bias=bias, dtype=torch.bfloat16)
    left.amax.mul_(2)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, operations.gemm(left, right, bias=bias, dtype=torch.bfloat16))
    assert not torch.equal(captured, expected)


def test_threads_may_share_a_product() -> None:
    left, right = operands("nvfp4", "nvfp4", 128, 256, 64)
    biases = [torch.full((64,), float(i), device="cuda", dtype=torch.bfloat16) for i in range(8)]
    expected = [operations.gemm(left, right, bias=bias, dtype=torch.bfloat16) for bias in biases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            made = pool.map(lambda bias: operations.gemm(left, right, bias=bias, dtype=torch.bfloat16), biases)
            assert equal(made, expected)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_what_serves(a: str, b: str) -> None:
    choice = choose("gemm", (lpq.quantizer(a).text, lpq.quantizer(b).text), torch.device("cuda", 0))
    assert (choice.backend == "reference") == ((a, b) == REFERENCE), choice.rejected


def test_a_pair_without_a_scaled_matmul_says_so() -> None:
    choice = choose("gemm", ("fp8(dtype=e5m2)", "fp8(dtype=e5m2)"), torch.device("cuda", 0))
    assert choice.kernel is not None
    assert choice.kernel.impl == "lpq.emulation.bf16_gemm:gemm_with_alpha"
    assert "E5M2 by E5M2" in choice.rejected[0][1]


def test_scales_of_blocks_that_are_not_exact_in_bf16_are_left_to_the_reference() -> None:
    odd = "fp8(scaling=block, block=128x128, pow2=false)"
    choice = choose("gemm", (lpq.quantizer(odd).text, lpq.quantizer(odd).text), torch.device("cuda", 0))
    assert choice.backend == "reference"
    assert "not exact in bf16" in choice.rejected[-1][1]
