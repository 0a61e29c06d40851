"""Norms in Triton, run by Triton's interpreter as the other sources are: rows, elements, operands and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from interpreted_sources import (
    CPU,
    SERVED,
    TopsQuantizer,
    _as_on_a_gpu,
    check,
    numbers,
    sources,
    triton,
)
from quick_interpreter import _quick_interpreter
from support.comparing import expect_bytes
from torch import Tensor, nn

import lpq
from lpq.kernels.triton import norms
from lpq.nn.norm_groups import groups_of
from lpq.nn.norms import bind_norm
from lpq.operations import norm_programs, produced_programs
from lpq.operations.norm_programs import bind_gradients, bind_rows, bind_sum_rows
from lpq.operations.norms import NormKind, norm_source
from lpq.testing.comparing import Poisoned

__all__ = ["_as_on_a_gpu", "_quick_interpreter"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RMS = [NormKind(1e-6), NormKind(1e-6, rounds=True), NormKind(1e-6, offset=True)]
LAYER = NormKind(1e-5, centers=True)
EVERY = [*((norm, False) for norm in RMS), (LAYER, False), (LAYER, True)]
IN_16_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
KINDS = pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
SHAPES = (9, 8), (37, 72), (3, 4104)
"""A program has many rows, some of them outside, or one row in several tiles, the last tile ragged."""


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that compute gradients have several tiles in turn, as on a GPU."""
    monkeypatch.setattr(norm_programs, "at_once", lambda blocks, each, device: min(blocks, 2))


def powers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Powers of two of either sign. Their products and sums are exact in fp32, in any order."""
    return (torch.randint(0, 4, shape).sub(2).exp2() * (torch.randint(0, 2, shape) * 2 - 1)).to(dtype)


# ---------------------------------------------------------------------------------------------- elements


@pytest.mark.parametrize(("norm", "biased"), EVERY)
@IN_16_BITS
def test_elements_and_operands(norm: NormKind, biased: bool, dtype: torch.dtype) -> None:
    """The elements are torch's to the bit: they need no sum."""
    check(norm_source(norm, biased), ["hybrid(row=mxfp8, col=fp8)"], (37, 72), dtype)


@pytest.mark.parametrize(("norm", "biased"), EVERY)
def test_elements_in_fp32(norm: NormKind, biased: bool) -> None:
    """They are encoded without being rounded before, as layers encode inputs in fp32."""
    check(norm_source(norm, biased), ["hybrid(row=nvfp4, col=fp8)"], (37, 72), torch.float32, measure=True)


@pytest.mark.parametrize("text", SERVED[::4])
def test_formats(text: str) -> None:
    """Both operands, of several tiles, which are ragged. All formats are encoded of other sources, by one code."""
    check(norm_source(RMS[0]), [text], (35, 150), torch.bfloat16, measure=True)


@pytest.mark.parametrize(("norm", "biased"), EVERY[::4])
def test_a_format_of_a_third_party(norm: NormKind, biased: bool) -> None:
    check(norm_source(norm, biased), [TopsQuantizer()], (37, 72), torch.bfloat16)
    check(norm_source(norm, biased), [TopsQuantizer()], (9, 150), torch.bfloat16)


def test_a_norm_that_forgets_to_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.jit
    def once(x, of_row, of_col, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
        return (x[0] * of_row[0] * of_col[0],)

    monkeypatch.setattr(sources, "rms_norm", once)
    check(norm_source(RMS[0]), ["mxfp8"], (37, 72), torch.bfloat16)
    with pytest.raises(AssertionError, match="rms_norm"):
        check(norm_source(RMS[1]), ["mxfp8"], (37, 72), torch.bfloat16)


# ---------------------------------------------------------------------------------------------- rows


@KINDS
@DTYPES
def test_rows_are_those_of_torch_but_for_the_order_of_sums(norm: NormKind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        x = (torch.randn(shape) + 1).to(dtype)
        with Poisoned():
            found = bind_rows(norm, shape, dtype, CPU)(x)
        for a, b in zip(found, norm.rows(x), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)


@KINDS
@DTYPES
def test_rows_are_exact_where_sums_are(norm: NormKind, dtype: torch.dtype) -> None:
    """A mean is exact, too, in rows of a power of two, or of numbers and their opposites."""
    torch.manual_seed(0)
    half = powers(37, 36, dtype=dtype)
    for x in (powers(9, 64, dtype=dtype), powers(3, 4096, dtype=dtype), torch.cat([half, -half], 1)):
        shape, high = (x.shape[0], x.shape[1]), x.float()
        mean = high.mean(1, keepdim=True)
        apart = high - mean if norm.centers else high
        expected = torch.rsqrt(apart.square().mean(1, keepdim=True) + norm.epsilon)
        *center, factor = bind_rows(norm, shape, dtype, CPU)(x)
        assert torch.equal(factor, expected)
        assert not center or torch.equal(center[0], mean)


@KINDS
@DTYPES
def test_rows_of_a_sum_are_those_of_its_matrix(norm: NormKind, dtype: torch.dtype) -> None:
    """And the sum is torch's, also where it is no number."""
    torch.manual_seed(0)
    for shape in SHAPES:
        x, residual = numbers(shape, dtype), numbers(shape, dtype)
        x[shape[0] // 2 :], residual[shape[0] // 2 :] = torch.randn(2, shape[0] - shape[0] // 2, shape[1]).to(dtype)
        with Poisoned():
            total, rows = bind_sum_rows(norm, shape, dtype, CPU)(x, residual)
            expected = bind_rows(norm, shape, dtype, CPU)(x + residual)
        assert torch.equal(total.nan_to_num(7), (x + residual).nan_to_num(7))
        for a, b in zip(rows, expected, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert not torch.equal(rows[-1][-1], bind_rows(norm, shape, dtype, CPU)(x)[-1][-1])


def test_rows_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = norms.launch

    def too_few(kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
        launch(kernel, count - 1, *arguments, **constants)

    monkeypatch.setattr(norms, "launch", too_few)
    with pytest.raises(AssertionError):
        test_rows_are_those_of_torch_but_for_the_order_of_sums(RMS[0], torch.bfloat16)


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
@DTYPES
def test_gradients(norm: NormKind, dtype: torch.dtype) -> None:
    """They round where autograd's do: a bit differs here and there, as sums have another order."""
    torch.manual_seed(1)
    for shape in ((9, 1024), (37, 72), (3, 4104)):
        x, dy, other = torch.randn(3, *shape).to(dtype)
        weight, factor = torch.randn(shape[1]).to(dtype), norm.rows(x)[0]
        compute = bind_gradients(norm, shape, dtype, CPU)
        assert compute is not None
        with Poisoned():
            found = compute(dy, x, weight, factor, True, None)
            dx, same = compute(dy, x, weight, factor, True, other)
            alone, none = compute(dy, x, weight, factor, False, None)
        for a, b in zip(found, norm.gradients(dy, (x, weight), (), (True, True)), strict=True):
            assert a is not None
            assert b is not None
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b)
            assert dtype == torch.float32 or (a == b).float().mean() > 0.98
        assert torch.equal(dx, found[0] + other)
        assert same is not None
        assert torch.equal(same, found[1])
        assert torch.equal(alone, found[0])
        assert none is None


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
def test_gradients_are_exact_where_sums_are(norm: NormKind) -> None:
    torch.manual_seed(1)
    shape, dtype = (37, 64), torch.bfloat16
    x, dy, weight = powers(*shape), powers(*shape), powers(64)
    factor = powers(37, 1, dtype=torch.float32).abs()
    compute = bind_gradients(norm, shape, dtype, CPU)
    assert compute is not None
    dx, of_weight = compute(dy, x, weight, factor, True, None)
    scale, r = (1.0 + weight if norm.offset else weight).double(), factor.double()
    of_normed = dy.double() * scale
    back = (of_normed * x.double()).mean(1, keepdim=True) * r * r * r
    assert torch.equal(dx, (of_normed * r - x.double() * back).to(dtype))
    assert of_weight is not None
    assert torch.equal(of_weight, (dy.double() * x.double() * r).sum(0).to(dtype))


def test_what_torch_computes() -> None:
    """Gradients of layer norms and of wide rows, as beside the kernels in CUDA C++."""
    assert bind_gradients(LAYER, (2, 64), torch.bfloat16, CPU) is None
    assert bind_gradients(RMS[0], (2, 8200), torch.bfloat16, CPU) is None


# ---------------------------------------------------------------------------------------------- all of it


@pytest.mark.parametrize(("norm", "biased"), [(RMS[0], False), (LAYER, True)], ids=["rms", "layer"])
@pytest.mark.parametrize("text", ["fp8-current", "mxfp8"])
def test_a_norm_of_a_sum_by_its_kernels(
    norm: NormKind, biased: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of rows are those in Triton, too, where the ones of elements are."""
    monkeypatch.setattr(produced_programs, "not_here", lambda *what: None)
    torch.manual_seed(2)
    x, residual = torch.randn(2, 3, 12, 64).bfloat16()
    columns = torch.rand(2, 64).bfloat16()[: 1 + biased]
    plan = lpq.convert(nn.Sequential(nn.Linear(8, 8)), text)[0].passes.plan
    bound = bind_norm(norm, groups_of([plan], [True]), x, biased, others=True, adds=True)
    made, total, rows = bound.encode(x, residual, (*columns,), [()])
    assert torch.equal(total, x + residual)
    matrix = total.view(36, 64)
    for a, b in zip(rows, bind_rows(norm, (36, 64), torch.bfloat16, CPU)(matrix), strict=True):
        assert torch.equal(a, b)
    (expected,) = norm_source(norm, biased).compute(matrix, *rows, *columns)
    whole = plan.x.quantize(expected)
    expect_bytes(made.buffers, whole.buffers, text)
    assert torch.equal(made.value, expected.view(x.shape))  # type: ignore[attr-defined]
    assert (bound.gradients is None) == norm.centers
    alone = bind_norm(norm, [], x, biased, others=True, adds=True)  # for layers that encode it by themselves
    assert (alone.gradients is None) == norm.centers
    y, *others = alone.encode(x, residual, (*columns,), [])
    assert type(y) is Tensor
    for a, b in zip((y, others[0], *others[1]), (made.value, total, *rows), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a, b)


MADE_OF_ROW = "x=hybrid(row=mxfp8, col=fp8, col_source=row), w=mxfp8, dy=fp8"


@pytest.mark.parametrize(
    "texts", [("mxfp8", "nvfp4"), (MADE_OF_ROW, "mxfp8", "fp8-current")], ids=["both", "one apart"]
)
@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
def test_rows_are_found_once_for_all_groups(
    norm: NormKind, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder is given what the first run computes, where the kernel of elements does not encode its format."""
    monkeypatch.setattr(produced_programs, "not_here", lambda *what: None)
    found, rows_of = [], norm_programs._rows
    monkeypatch.setattr(norm_programs, "_rows", lambda *args: found.append(1) or rows_of(*args))
    torch.manual_seed(2)
    x, weight = torch.randn(12, 64).bfloat16(), torch.rand(64).bfloat16()
    plans = [lpq.convert(nn.Sequential(nn.Linear(8, 8)), text)[0].passes.plan for text in texts]
    bound = bind_norm(norm, groups_of(plans, [True] * len(plans)), x, False)
    made, _, rows = bound.encode(x, None, (weight,), [()] * len(plans))
    assert len(found) == 1
    encodings: list[Any] = [made, *made.beside]  # type: ignore[attr-defined]
    assert {encoded.quantizer.text for encoded in encodings} == {plan.x.text for plan in plans}
    (expected,) = norm_source(norm).compute(x, *rows, weight)
    for encoded in encodings:
        text = encoded.quantizer.text
        expect_bytes(encoded.buffers, encoded.quantizer.quantize(expected).buffers, text)


@pytest.mark.parametrize("others", [False, True], ids=["layers", "others"])
@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
def test_what_backward_encodes_is_what_forward_would_have(
    norm: NormKind, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same kernel, of the same rows, and where both operands have one amax, with the amax that it measured."""
    monkeypatch.setattr(produced_programs, "not_here", lambda *what: None)
    torch.manual_seed(2)
    x, weight = torch.randn(12, 64).bfloat16(), torch.rand(64).bfloat16()
    recipes = [lpq.recipe(text) for text in ("fp8-current", "mxfp8", "nvfp4", "fp8-block", MADE_OF_ROW)]
    texts = [f"x={recipe.x}, w={recipe.w}, dy={recipe.dy}, x.save=" for recipe in recipes]
    made: dict[str, list[Any]] = {}
    for option in ("encoded", "input"):
        plans = [lpq.convert(nn.Sequential(nn.Linear(8, 8)), text + option)[0].passes.plan for text in texts]
        bound = bind_norm(norm, groups_of(plans, [True] * len(plans)), x, False, others)
        first, _, rows = bound.encode(x, None, (weight,), [()] * len(plans))
        made[option] = [first, *first.beside]  # type: ignore[attr-defined]
        (expected,) = norm_source(norm).compute(x, *rows, weight)
        assert not others or torch.equal(first.value, expected)  # type: ignore[attr-defined]
    for whole, row in zip(made["encoded"], made["input"], strict=True):
        _, of_row, kept, column = row.operand_cache
        assert row.col is None
        expect_bytes(of_row, whole.operand_cache[1], whole.quantizer.text)
        assert kept[0].data_ptr() == x.data_ptr()
        expect_bytes(column.encoder.later(kept), whole.operand_cache[2], whole.quantizer.text)
