"""Norms: one kernel finds what rows have in common, and another computes and encodes. A CPU imitates the GPU."""

from __future__ import annotations

import imitated
import pytest
import torch
from support.comparing import expect_bytes
from test_producers_imitated import CPU, check, numbers
from tile_sides import side_of

import lpq
from lpq.operations import produced_tiles
from lpq.operations.encoder import EncoderSpec, encoding_of, one_by_one
from lpq.operations.norm_kernels import bind_gradients, bind_rows, bind_sum_rows
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.produced_tiles import SourceOutput
from lpq.testing.comparing import Poisoned

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
RMS = [NormKind(1e-6), NormKind(1e-6, rounds=True), NormKind(1e-6, offset=True)]
LAYER = NormKind(1e-5, centers=True)
ROWS = [(9, 8), (16, 1032), (1, 2048), (2, 8200)]
"""A layer norm keeps rows of one, two and four batches, and reads the longest one again."""


@pytest.mark.parametrize(("norm", "biased"), [(RMS[0], False), (LAYER, True)], ids=["rms", "layer"])
def test_elements_that_nothing_encodes(norm: NormKind, biased: bool, launched: list[str]) -> None:
    source, shape, dtype = norm_source(norm, biased), (37, 136), torch.bfloat16
    torch.manual_seed(0)
    x, *columns = numbers(*shape, dtype=dtype), *torch.rand(1 + biased, 136).to(dtype)
    inputs = [x, *norm.rows(x), *columns]
    run = produced_tiles.bind(source, shape, dtype, CPU, [None], [True])
    with Poisoned():
        ((row, col, stats, value),) = run(inputs, [None], [None])
    assert not any((*row, *col, *stats))
    torch.testing.assert_close(value, source.compute(*inputs)[0], rtol=2**-6, atol=1e-6, equal_nan=True)
    assert launched == ["produce"]


@pytest.mark.parametrize(("norm", "biased"), [(RMS[1], False), (LAYER, True)], ids=["rms", "layer"])
@pytest.mark.parametrize("text", ["hybrid(row=mxfp8, col=fp8)", "nvfp4", "fp8(scaling=row)", "fp8(scaling=block)"])
def test_elements_in_fp32(norm: NormKind, biased: bool, text: str) -> None:
    """They are encoded without being rounded before, as layers encode inputs in fp32."""
    for shape in ((37, 136), (128, 128)):
        check(norm_source(norm, biased), [text], shape, torch.float32, measure=shape[0] == 37)


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4", "fp8(scaling=row)", "fp8(scaling=block)"])
def test_an_operand_that_backward_makes_is_what_forward_would_have_made(text: str) -> None:
    """With the amax that forward measured, where both operands have the same."""
    shape, source, quantizer = (37, 136), norm_source(RMS[0]), lpq.quantizer(text)
    x, weight = torch.randn(shape).bfloat16(), torch.rand(shape[1]).bfloat16()
    inputs = x, *RMS[0].rows(x), weight
    spec = EncoderSpec(quantizer, shape, torch.bfloat16, CPU)
    made, stats = [], ()
    for one in (spec, *one_by_one(spec)):
        e = encoding_of(one)._replace(dispatched=True)
        output = SourceOutput(e, *(side and side_of(side, way) for side, way in ((e.row, "row"), (e.col, "col"))))
        run = produced_tiles.bind(source, shape, torch.bfloat16, CPU, [output], [False])
        with Poisoned():
            (result,) = run(inputs, [stats if one.given else ()], [None])
        made.append(result)
        stats = result.stats
    both, row, col = made
    assert (len(row.stats), one.given) == ((1, (True,)) if text == "fp8" else (0, ()))
    expect_bytes([*row.row, *col.col], [*both.row, *both.col], text)


@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
@DTYPES
def test_rows(norm: NormKind, dtype: torch.dtype, launched: list[str]) -> None:
    torch.manual_seed(0)
    for shape in ROWS:
        x = (torch.randn(shape) + 1).to(dtype)
        found, expected = bind_rows(norm, shape, dtype, CPU)(x), norm.rows(x)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)
    assert launched == ["norm_rows"] * len(ROWS)


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
@DTYPES
def test_gradients(norm: NormKind, dtype: torch.dtype, launched: list[str]) -> None:
    """They round where autograd's do: a bit differs here and there, as sums have another order."""
    torch.manual_seed(1)
    for shape in ((9, 1024), (5, 1032), (3, 4096)):
        x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        weight = torch.randn(shape[1]).to(dtype)
        compute = bind_gradients(norm, shape, dtype, CPU)
        assert compute is not None
        found = compute(dy, x, weight, norm.rows(x)[0], True, None)
        expected = norm.gradients(dy, (x, weight), (), (True, True))
        for a, b in zip(found, expected, strict=True):
            assert a is not None
            assert b is not None
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b)
            assert dtype == torch.float32 or (a == b).float().mean() > 0.98
        assert torch.equal(compute(dy, x, weight, norm.rows(x)[0], False, None)[0], found[0])
        assert compute(dy, x, weight, norm.rows(x)[0], False, None)[1] is None
    assert bind_gradients(norm, (1, 8200), dtype, CPU) is None


@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
@DTYPES
def test_rows_of_a_sum_are_those_that_the_kernel_of_rows_finds(norm: NormKind, dtype: torch.dtype) -> None:
    """And the sum is torch's, also where it is no number."""
    torch.manual_seed(0)
    for shape in ROWS:
        x, residual = (numbers(*shape, dtype=dtype) for _ in range(2))
        x[shape[0] // 2 :], residual[shape[0] // 2 :] = (torch.randn(2, shape[0] - shape[0] // 2, shape[1]) + 1).to(
            dtype
        )
        with Poisoned():
            total, rows = bind_sum_rows(norm, shape, dtype, CPU)(x, residual)
            expected = bind_rows(norm, shape, dtype, CPU)(x + residual)
        assert torch.equal(total.nan_to_num(7), (x + residual).nan_to_num(7))
        assert len(rows) == len(expected)
        for a, b in zip(rows, expected, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert not torch.equal(rows[-1][-1], bind_rows(norm, shape, dtype, CPU)(x)[-1][-1])


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_from_elsewhere_is_added_as_autograd_adds_it(norm: NormKind, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for shape in ((9, 1024), (300, 16), (3, 2048)):
        x, dy, other = torch.randn(3, *shape).to(dtype)
        weight = torch.randn(shape[1]).to(dtype)
        compute = bind_gradients(norm, shape, dtype, CPU)
        assert compute is not None
        with Poisoned():
            alone, of_weight = compute(dy, x, weight, norm.rows(x)[0], True, None)
            dx, same = compute(dy, x, weight, norm.rows(x)[0], True, other)
        assert torch.equal(dx, alone + other)
        assert of_weight is not None
        assert same is not None
        assert torch.equal(same, of_weight)
        assert compute(dy, x, weight, norm.rows(x)[0], False, other)[1] is None
