"""Decoding and transposing on a GPU give the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lpq
from lpq.core import operations
from lpq.ops import choose
from lpq.testing.conformance.test_kernels import Poisoned

pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DECODED = [
    "fp8", "fp8(dtype=e5m2)", "fp8(scaling=row)", "fp8(scaling=block, dtype=e5m2)", "fp8(scaling=block, block=128x128)",
    "mxfp8", "mxfp8(dtype=e5m2)", "nvfp4", "nvfp4(block=16x16)",
]  # fmt: skip
TRANSPOSED = ["fp8", "fp8(dtype=e5m2)", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"]
SHAPES = [
    (128, 128), (256, 512), (1, 1), (33, 80), (1, 1000), (1000, 1), (130, 257), (300, 136), (16, 4096), (257, 272),
    (0, 64), (64, 0),
]  # fmt: skip


def numbers(rows: int, cols: int) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(rows * 1009 + cols)
    x = torch.randn(rows, cols, device="cuda", generator=g)
    chance = torch.rand(rows, cols, device="cuda", generator=g)
    return [
        x,
        x * torch.exp2(torch.randint(-60, 60, (rows, cols), device="cuda", generator=g)),
        torch.where(chance < 0.01, float("nan"), x),
        torch.where(chance < 0.01, float("inf"), x),
        x * 1e-38,
        x * 1e37,
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("text", DECODED)
def test_decode_equals_the_reference(text: str) -> None:
    assert choose("decode", (lpq.quantizer(text).text,), torch.device("cuda", 0)).backend == "cuda"
    for shape in SHAPES:
        for i, x in enumerate(numbers(*shape)):
            operand = lpq.quantizer(text).quantize(x, col=False).row
            assert operand is not None
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                with Poisoned():  # type: ignore[no-untyped-call]
                    got = operations.decode(operand, dtype)
                expected = operations.decode_reference(operand, dtype)
                assert got.shape == expected.shape
                assert torch.equal(as_bytes(got.nan_to_num(7.0)), as_bytes(expected.nan_to_num(7.0))), (shape, i, dtype)
                assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("text", TRANSPOSED)
def test_transpose_equals_the_reference(text: str) -> None:
    assert choose("transpose", (lpq.quantizer(text).text,), torch.device("cuda", 0)).backend == "cuda"
    for shape in SHAPES:
        operand = lpq.quantizer(text).quantize(numbers(*shape)[0], col=False).row
        assert operand is not None
        with Poisoned():  # type: ignore[no-untyped-call]
            got = operations.transpose(operand)
        expected = operations.transpose_reference(operand)
        assert got.shape == expected.shape
        for a, b in zip(got.tensors(), expected.tensors(), strict=True):
            assert a.shape == b.shape
            assert torch.equal(as_bytes(a), as_bytes(b)), shape


def test_a_slice_is_decoded_and_transposed() -> None:
    """Its buffers are views that need not be contiguous, nor begin at multiples of 16 bytes."""
    x = numbers(256, 384)[0]
    for text in ("fp8", "mxfp8", "nvfp4(block=16x16)"):
        whole = lpq.quantizer(text).quantize(x, col=False).row
        assert whole is not None
        part = whole.narrow(1, 32, 384)
        assert part is not None
        below = part.narrow(0, 16, 256)
        assert below is not None
        for operand in (part, below):
            got = operations.decode(operand, torch.bfloat16)
            assert torch.equal(got, operations.decode_reference(operand, torch.bfloat16))
