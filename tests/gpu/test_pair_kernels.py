"""Operands of two formats from one read: the bytes of the references, for any shape, dtype, alignment and choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzzed import (
    DTYPES,
    assert_captured,
    assert_same,
    inputs,
    of_many_elements,
    quantize,
    seed,
    sides,
    unaligned_offset,
)
from support.third_party import row_operand, row_side
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq import operations
from lpq.core import Quantizer, encode_operands
from lpq.kernels import choose
from lpq.operations import fused_pair
from lpq.operations.binding import cached_by_shape
from lpq.operations.fused_pair import TileSide
from lpq.operations.references import quantize_reference
from lpq.testing.comparing import Poisoned, check_order

pytest.importorskip("cuda.core", reason="needs cuda-core")

PAIRS = [
    f"hybrid(row={row}, col={col})"
    for row, col in (
        ("fp8", "mxfp8"),
        ("fp8", "nvfp4"),
        ("fp8", "nvfp4(rht=true)"),
        ("fp8", "fp8(scaling=block)"),
        ("fp8(scaling=delayed, dtype=e5m2)", "nvfp4"),
        ("fp8(scaling=delayed)", "fp8(scaling=delayed, dtype=e5m2)"),
        ("fp8(scaling=row)", "mxfp8"),
        ("fp8(scaling=block)", "mxfp8(dtype=e5m2)"),
        ("fp8(scaling=block, pow2=false, dtype=e5m2)", "nvfp4(rht=true, stochastic=true)"),
        ("fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"),
        ("mxfp8", "fp8(pow2=true)"),
        ("mxfp8", "fp8(scaling=delayed)"),
        ("mxfp8(dtype=e5m2)", "fp8(scaling=row)"),
        ("mxfp8", "fp8(scaling=block)"),
        ("mxfp8", "nvfp4"),
        ("mxfp8", "mxfp4(scale=ceil, rht=true, stochastic=true)"),
        ("mxfp4", "fp8"),
        ("mxfp4(scale=even)", "nvfp4(rht=true)"),
        ("mxfp8", "nvfp4(rht=true, stochastic=true)"),
        ("nvfp4", "fp8"),
        ("nvfp4", "fp8(scaling=block)"),
        ("nvfp4", "mxfp8"),
        ("nvfp4(stochastic=true)", "mxfp8"),
        ("nvfp4(stochastic=unbiased)", "mxfp8"),
        ("nvfp4(search=four_over_six)", "mxfp8"),
        ("nvfp4(scaling=row)", "mxfp8"),
        ("nvfp4", "nvfp4(scaling=row, search=four_over_six, norm=256)"),
        ("fp8", "nvfp4(block=16x16, search=four_over_six, error=mae, norm=256)"),
        ("nvfp4(stochastic=true)", "fp8(scaling=block, block=128x128)"),
        ("nvfp4(block=16x16)", "fp8(scaling=delayed, dtype=e5m2)"),
        ("nvfp4", "nvfp4(block=16x16)"),
        ("nvfp4(block=16x16)", "nvfp4(rht=true)"),
    )
]
SHAPES = [(128, 128), (256, 512), (1, 1), (33, 80), (130, 257), (300, 136), (31, 16), (0, 64)]
FEW = ["normal", "wide range", "nan", "infinite", "zeros", "unaligned", "transposed"]


def both(text: str) -> tuple[Quantizer, Quantizer]:
    row, col = sides(text, True, True)
    assert row is not None
    assert col is not None
    return row, col


@pytest.mark.parametrize("text", PAIRS)
def test_one_kernel_serves_both(text: str) -> None:
    row, col = both(text)
    choice = choose("quantize", (row.text, col.text), torch.device("cuda", 0))
    assert choice.impl is fused_pair.quantize, choice.rejected


@pytest.mark.parametrize("text", PAIRS)
def test_it_equals_the_reference(text: str) -> None:
    """The statistics measured here or given, and asked for or not. Each shape in a dtype, and each dtype in shapes."""
    row, col = both(text)
    for i, (rows, cols) in enumerate(SHAPES):
        dtype = DTYPES[(i + PAIRS.index(text)) % 3]
        for name, x in inputs(rows, cols, dtype):
            if name not in FEW:
                continue
            others = operations.measure_reference(x * 0.5, row, col)
            mixed = [None if k % 2 else s for k, s in enumerate(others)]
            cases = [([], 0, False)]
            if name in ("normal", "nan", "unaligned"):
                cases += [([], 16, True), (others, 0, True), (others, 32, False), (mixed, unaligned_offset(col), True)]
            for stats, offset, measure in cases:
                expected = quantize_reference(x, stats, row, col, seed(), offset, measure)
                got = quantize(x, stats, row, col, offset, measure)
                what = f"{text} {rows}x{cols} {dtype} {name}, {len(stats)} {offset} {measure}"
                assert_same(got, expected, what)
                check_order(got, expected, what)


@pytest.mark.parametrize("text", PAIRS)
@pytest.mark.parametrize("shape", [(128 * 34, 128 * 33), (128 * 17, 128 * 31), (128 * 34 + 16, 128 * 33)], ids=str)
def test_many_tiles(text: str, shape: tuple[int, int]) -> None:
    """Blocks of threads take several tiles in turn."""
    row, col = both(text)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    for measure in (False, True):
        expected = quantize_reference(x, [], row, col, seed(), 0, measure)
        assert_same(quantize(x, [], row, col, 0, measure), expected, f"{text} {shape} {measure}")


@pytest.mark.parametrize("text", PAIRS)
def test_no_synchronisation_and_capture(text: str) -> None:
    assert_captured(text)


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("hybrid(row=mxfp8, col=fp8(scaling=block))", ["pair"]),
        ("hybrid(row=fp8, col=mxfp8)", ["amax_parts", "pair"]),
        ("hybrid(row=fp8, col=nvfp4)", ["amax_parts", "pair"]),
        ("hybrid(row=nvfp4, col=fp8)", ["amax_parts", "pair"]),
        ("hybrid(row=fp8, col=nvfp4(rht=true))", ["amaxes", "pair"]),
        ("hybrid(row=nvfp4, col=nvfp4(block=16x16))", ["amax_parts", "pair"]),
    ],
)
def test_the_tensor_is_measured_once(text: str, kernels: list[str]) -> None:
    """Statistics of both operands come from one read."""
    quantizer = lpq.quantizer(text)
    x = torch.randn(512, 384, device="cuda", dtype=torch.bfloat16)
    encode_operands(quantizer, x)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as found:
        encode_operands(quantizer, x)
        torch.cuda.synchronize()
    assert sorted(e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA) == kernels


def test_more_than_2_31_elements() -> None:
    """The last operand is encoded as it is alone."""
    whole, last = of_many_elements("hybrid(row=mxfp8, col=nvfp4)")
    assert whole.row is not None
    assert last.row is not None
    assert_same([whole.row.tensors()[0][-128:]], [last.row.tensors()[0]], "rows")
    assert whole.col is not None
    assert last.col is not None
    assert_same([whole.col.tensors()[0][-256:, -64:]], [last.col.tensors()[0][-256:]], "columns")


@pytest.mark.parametrize(("first", "second"), [("mxfp8", "nvfp4"), ("fp8(scaling=block)", "mxfp8"), ("fp8", "mxfp8")])
def test_tiles_in_turn_of_a_row_operand_that_does_not_wait(first: str, second: str) -> None:
    """No two of our formats take them so. What the next tile writes must not meet what is read for the one before."""
    row, col = lpq.quantizer(first), lpq.quantizer(second)
    sides = (
        fused_pair.side_of(row, "row", torch.device("cuda", 0)),
        fused_pair.side_of(col, "col", torch.device("cuda", 0)),
    )
    taken = [replace(side, turns=3) for side in sides if isinstance(side, TileSide)]
    for shape in ((128 * 6, 128 * 10), (300, 517)):
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        with Poisoned():  # type: ignore[no-untyped-call]
            got = cached_by_shape(fused_pair.Pair(*taken).bind)(x, [], row, col, seed(), 0, False)
        assert_same(got, quantize_reference(x, [], row, col, seed(), 0, False), f"{first} {second} {shape}")


# ---------------------------------------------------------------------------------------------- a third party's format


def test_a_format_of_a_third_party_is_made_beside_one_of_ours(tmp_path: Path) -> None:
    """Its struct is all that it needs."""
    device = torch.device("cuda", 0)
    nvfp4 = lpq.quantizer("nvfp4")
    ours = fused_pair.side_of(nvfp4, "col", device)
    assert isinstance(ours, TileSide)
    pair = fused_pair.Pair(row_side(tmp_path), ours)
    x = torch.randn(300, 256, device=device, dtype=torch.bfloat16)
    with Poisoned():  # type: ignore[no-untyped-call]
        got = cached_by_shape(pair.bind)(x, [], lpq.quantizer("identity"), nvfp4, None, 0, False)
    expected = quantize_reference(x, [], None, nvfp4, None, 0, False)
    assert_same(got, [row_operand(x), *expected], "theirs beside nvfp4")
