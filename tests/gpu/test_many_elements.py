"""Matrices of more than 2^31 elements: what rounds on the way, what is made for a product, and what masters become."""

from __future__ import annotations

import pytest
import torch
from casting import Case, check
from fuzzed import assert_same, seed
from torch import Tensor

import lpq
from lpq import operations
from lpq.distributed import cast_master_weights, finish_gather
from lpq.emulation.bf16_gemm import exact as exact_form
from lpq.operations.exact_form import Multiplicand
from lpq.operations.multiplicands import multiplicands

pytest.importorskip("cuda.core", reason="needs cuda-core")
SHAPE = (2**16 + 128, 2**15)
MEASURED = [
    "fp8", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "nvfp4", "nvfp4(rht=true)", "nvfp4(block=16x16)",
]  # fmt: skip
ENCODED = [
    "fp8", "fp8(scaling=row)", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4",
    "nvfp4(rht=true)", "nvfp4(block=16x16)", "nvfp4(rht=true, stochastic=true)",
]  # fmt: skip
PAIRED = [
    "hybrid(row=fp8, col=nvfp4)", "hybrid(row=mxfp8, col=fp8(scaling=block))", "hybrid(row=nvfp4, col=mxfp8)",
]  # fmt: skip


def _matrix(dtype: torch.dtype) -> Tensor:
    """No line of which is that of another, 2^31 elements later."""
    rows, cols = SHAPE
    x = torch.randn(rows, 256, device="cuda", dtype=dtype).repeat(1, cols // 256)
    assert x.numel() > 2**31
    return x


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=row)", "fp8(scaling=block)", "mxfp8", "nvfp4(rht=true)"])
def test_rounded_on_the_way(text: str) -> None:
    """All bytes are those of a rounded copy."""
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = _matrix(torch.float32)
    made = operations.quantize(x, None, row, col, seed(), dtype=torch.bfloat16)
    x = x.to(torch.bfloat16)
    expected = operations.quantize(x, None, row, col, seed())
    for one, other in zip(made[:2], expected[:2], strict=True):
        assert one is not None
        assert other is not None
        assert_same(list(one.tensors()), list(other.tensors()), text)


@pytest.mark.parametrize("text", [*ENCODED, *PAIRED])
def test_one_operand_alone(text: str) -> None:
    """All bytes are those that the operand has beside the other: of a pair, by two formats' own kernels."""
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = _matrix(torch.bfloat16)
    both = operations.quantize(x, None, row, col, seed())
    for place, sides in enumerate([(row, None), (None, col)]):
        alone, beside = operations.quantize(x, None, *sides, seed())[place], both[place]
        assert alone is not None
        assert beside is not None
        assert_same(list(beside.tensors()), list(alone.tensors()), f"{text}, {sides}")


@pytest.mark.parametrize("text", MEASURED)
def test_statistics(text: str) -> None:
    """Those of the last rows are what these have alone, and the largest is found where it lies last."""
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = _matrix(torch.bfloat16)
    x[-1, -1] = 1e4
    of_all, of_end = (operations.measure(part, row, col) for part in (x, x[-128:].clone()))
    for (stat, dim), found, expected in zip(operations.declared(row, col), of_all, of_end, strict=True):
        if stat.block != (None, None):
            assert found.numel() > expected.numel()
            found = found.narrow(dim, found.shape[dim] - expected.shape[dim], expected.shape[dim])
        assert_same([found], [expected], f"{text}, {stat.name} along {dim}")


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "nvfp4(rht=true, stochastic=true)"])
def test_exact_forms(text: str) -> None:
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = _matrix(torch.bfloat16)
    with torch.no_grad():
        made = multiplicands(x, row, col, seed(), (True, True))
        encoded = operations.quantize(x, None, row, col, seed())
    assert made is not None
    for got, operand in zip(made, encoded, strict=False):
        assert isinstance(got, Multiplicand)
        expected = exact_form(operand)
        assert expected is not None
        assert torch.equal(got.form.matrix.view(torch.int16), expected.matrix.view(torch.int16))


@pytest.mark.parametrize("text", ["nvfp4(stochastic=true)", "nvfp4(block=16x16, stochastic=true)"])
def test_random_bits(text: str) -> None:
    """Elements from 2^31 on have those that the reference draws for a shard of the matrix that begins there."""
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = _matrix(torch.bfloat16)
    found = operations.measure(x, row, col)
    stats = [
        amax if stat.block == (None, None) else None
        for amax, (stat, _) in zip(found, operations.declared(row, col), strict=True)
    ]
    made = operations.quantize(x, stats, row, col, seed())
    first, last = SHAPE[0] - 128, SHAPE[0]
    assert first * SHAPE[1] >= 2**31
    expected = operations.quantize_reference(x[first:].clone(), stats, row, col, seed(), first, measure=False)
    (row_data, row_scale, _), (col_data, col_scale, _) = expected[:3], expected[3:]
    of_row, of_col = made[0], made[1]
    assert of_row is not None
    assert of_col is not None
    high = 16 if "16x16" in text else 1
    assert_same(
        [
            of_row.data[first:last],
            of_row.scale[first // high :],
            of_col.data[:, first // 2 :],
            of_col.scale[:, first // 16 :],
        ],
        [row_data, row_scale, col_data, col_scale],
        text,
    )


@pytest.mark.parametrize("text", ["fp8", "mxfp8"])
def test_master_weights(text: str) -> None:
    """Of 2^31 elements and more, whose last ones are those of a rank."""
    case = Case(lpq.quantizer(text), _matrix(torch.float32), [(0, SHAPE[0] * SHAPE[1])])
    weight = case.weight()
    finish_gather(cast_master_weights([weight], [case.part(0)], [0], None))
    check(weight, case.expected(0), text)
