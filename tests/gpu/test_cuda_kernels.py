"""Every CUDA kernel gives the bytes of the reference: for any shape, dtype, alignment and choice of operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lpq
from lpq.core import Quantizer, operations
from lpq.core.operations import quantize_reference
from lpq.core.philox import RandomBits
from lpq.ops import choose
from lpq.testing.conformance.test_kernels import Poisoned

pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUANTIZERS = [
    "fp8",
    "fp8(dtype=e5m2, pow2=true)",
    "fp8(scaling=delayed)",
    "fp8(scaling=row)",
    "fp8(scaling=row, dtype=e5m2, pow2=true)",
    "fp8(scaling=block)",
    "fp8(scaling=block, pow2=false, dtype=e5m2)",
    "fp8(scaling=block, block=128x128)",
    "fp8(scaling=block, block=128x128, pow2=false)",
    "mxfp8",
    "mxfp8(dtype=e5m2)",
    "hybrid(row=mxfp8, col=mxfp8(dtype=e5m2))",
    "hybrid(row=fp8(scaling=block), col=fp8(scaling=block, dtype=e5m2))",
    "hybrid(row=fp8(scaling=row), col=mxfp8)",
    "nvfp4",
    "nvfp4(block=16x16)",
    "nvfp4(stochastic=true)",
    "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)",
    "nvfp4(block=16x16, stochastic=true)",
    "nvfp4(block=16x16, rht=true)",
]
SHAPES = [
    (128, 128), (256, 512), (64, 384), (1, 1), (33, 80), (1, 1000), (1000, 1), (130, 257), (300, 136), (136, 300),
    (16, 4096), (31, 16), (257, 272), (0, 64), (64, 0),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIDES = [(True, False), (False, True), (True, True)]


def inputs(rows: int, cols: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Matrices with every kind of number, aligned, unaligned and transposed."""
    g = torch.Generator("cuda").manual_seed(rows * 1009 + cols)
    x = torch.randn(rows, cols, device="cuda", generator=g)
    powers = torch.randint(-30, 16, (rows, cols), device="cuda", generator=g)
    chance = torch.rand(rows, cols, device="cuda", generator=g)
    yield "normal", x.to(dtype)
    yield "wide range", (x * torch.exp2(powers)).to(dtype)
    yield "tiny", (x * 1e-40 if dtype != torch.float16 else x * 1e-7).to(dtype)
    yield "large", torch.where(chance < 0.1, torch.finfo(dtype).max, x).to(dtype)
    yield "zeros", torch.where(chance < 0.5, -0.0, 0.0).to(dtype)
    yield "nan", torch.where(chance < 0.01, -float("nan"), x).to(dtype)
    yield "infinite", torch.where(chance < 0.01, -float("inf"), x).to(dtype)
    yield "grid", (x * 8).round().div(4).to(dtype)
    yield "unaligned", torch.cat([x.new_zeros(1), x.flatten()]).to(dtype)[1:].view(rows, cols)
    yield "transposed", x.t().contiguous().to(dtype).t()


def sides(text: str, row: bool, col: bool) -> tuple[Quantizer | None, Quantizer | None]:
    quantizer = lpq.quantizer(text)
    return (quantizer.side("row") if row else None), (quantizer.side("col") if col else None)


def as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]


def run(
    x: Tensor, stats: list[Tensor | None], row: Quantizer | None, col: Quantizer | None, offset: int, measure: bool
) -> list[Tensor]:
    seed = torch.tensor(-12345678901, device="cuda")
    texts = (row.text if row else "", col.text if col else "")
    with Poisoned():  # type: ignore[no-untyped-call]
        out: list[Tensor] = torch.ops.lpq.quantize(x, stats, *texts, seed, offset, measure)
    return out


@pytest.mark.parametrize("text", QUANTIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_equals_the_reference(text: str, dtype: torch.dtype) -> None:
    """The statistics measured here or given, and asked for or not."""
    seed = torch.tensor(-12345678901, device="cuda")
    for (rows, cols), (by_row, by_col) in itertools.product(SHAPES, SIDES):
        row, col = sides(text, by_row, by_col)
        for name, x in inputs(rows, cols, dtype):
            others = operations.measure_reference(x * 0.5, row, col)
            cases = [([], 0, False)]
            if name in ("normal", "nan", "unaligned"):
                cases += [([], 16, True), (others, 0, True), (others, 32, False), ([None] * len(others), 5, True)]
            for stats, offset, measure in cases:
                expected = quantize_reference(x, stats, row, col, seed, offset, measure)
                got = run(x, stats, row, col, offset, measure)
                assert len(got) == len(expected)
                for i, (a, b) in enumerate(zip(as_bytes(got), as_bytes(expected), strict=True)):
                    where = f"{row} {col} {rows}x{cols} {name} output {i}, stats {len(stats)} {offset} {measure}"
                    assert torch.equal(a, b), f"{where}: {int((a != b).sum())} of {a.numel()} bytes differ"


@pytest.mark.parametrize("text", QUANTIZERS)
def test_measure_equals_the_reference(text: str) -> None:
    for dtype, (rows, cols), (by_row, by_col) in itertools.product(DTYPES, SHAPES, SIDES):
        row, col = sides(text, by_row, by_col)
        for name, x in inputs(rows, cols, dtype):
            with Poisoned():  # type: ignore[no-untyped-call]
                got = operations.measure(x, row, col)
            for a, b in zip(got, operations.measure_reference(x, row, col), strict=True):
                assert a.shape == b.shape
                assert torch.equal(*as_bytes([a, b])), f"{row} {col} {rows}x{cols} {dtype} {name}"


@pytest.mark.parametrize("text", QUANTIZERS)
@pytest.mark.parametrize("shape", [(128 * 17, 128 * 33), (128 * 66, 128 * 9), (128 * 17 + 16, 128 * 33)], ids=str)
def test_many_tiles(text: str, shape: tuple[int, int]) -> None:
    """From some size on scales take another way to their places."""
    row, col = sides(text, True, True)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor(-12345678901, device="cuda")
    for (by_row, by_col), measure in itertools.product([(row, col), (row, None)], [False, True]):
        expected = quantize_reference(x, [], by_row, by_col, seed, 0, measure)
        got = run(x, [], by_row, by_col, 0, measure)
        for a, b in zip(as_bytes(got), as_bytes(expected), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("stochastic", [False, True])
def test_every_number_at_every_scale(stochastic: bool) -> None:
    """All bf16 numbers by blocks whose amaxes are of other tensors, so that products lie near and far of the grid."""
    row = lpq.quantizer(f"nvfp4(stochastic={str(stochastic).lower()})").side("row")
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int16)
    x = bits.view(torch.bfloat16).reshape(256, 256).repeat(4, 1)
    g = torch.Generator("cuda").manual_seed(1)
    for power in range(-120, 127, 13):
        amax = torch.rand((), device="cuda", generator=g) * 2.0**power
        blocks = amax * torch.rand(1024, 16, device="cuda", generator=g)
        stats: list[Tensor | None] = [amax, blocks]
        expected = quantize_reference(x, stats, row, None, torch.tensor(-12345678901, device="cuda"), 0, False)
        for a, b in zip(as_bytes(run(x, stats, row, None, 0, False)), as_bytes(expected), strict=True):
            assert torch.equal(a, b), power


def test_where_a_random_sum_meets_the_grid() -> None:
    """A sum is rounded before it is cut: magnitudes just above and below of what a random byte takes to the grid."""
    row = lpq.quantizer("nvfp4(stochastic=true)").side("row")
    seed = torch.tensor(-12345678901, device="cuda")
    byte = RandomBits(seed, 0).bytes(1024, 128).float()
    grid = torch.tensor([0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cuda").repeat(16)
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0], device="cuda").repeat(16)
    off = torch.arange(-16, 16, device="cuda").repeat(32)[:, None] * torch.tensor([2.0**-27, 2.0**-28], device="cuda")
    x = grid - byte / 256 * step + off.repeat(1, 64)
    stats: list[Tensor | None] = [x.new_tensor(2688.0), x.new_full((1024, 8), 6.0)]  # so that nothing is scaled
    expected = quantize_reference(x, stats, row, None, seed, 0, False)
    for a, b in zip(as_bytes(run(x, stats, row, None, 0, False)), as_bytes(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", QUANTIZERS)
@pytest.mark.parametrize("by", SIDES, ids=str)
def test_cuda_serves(text: str, by: tuple[bool, bool]) -> None:
    """Each operand alone, and both together unless they are of two kinds."""
    row, col = sides(text, *by)
    if row is not None and col is not None and "hybrid" in text and "col=mxfp8)" in text:
        pytest.skip("two formats are encoded one after the other")
    texts = tuple(q.text for q in (row, col) if q is not None)
    choice = choose("quantize", texts, torch.device("cuda", 0))
    assert choice.backend == "cuda", choice.rejected


@pytest.mark.parametrize("text", QUANTIZERS)
def test_no_synchronisation_and_capture(text: str) -> None:
    """A captured encoding replays on what the tensor then holds."""
    quantizer = lpq.quantizer(text)
    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor(7, device="cuda")
    quantizer.quantize(x, seed=seed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantizer.quantize(x, seed=seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantizer.quantize(x, seed=seed)
    x.copy_(torch.randn(256, 384, device="cuda") * 3)
    seed.fill_(8)
    graph.replay()
    expected = quantizer.quantize(x, seed=seed)
    for (_, a), (_, b) in zip(captured.operands, expected.operands, strict=True):
        for one, other in zip(as_bytes(a.tensors()), as_bytes(b.tensors()), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=row)", "mxfp8", "fp8(scaling=block)", "nvfp4(rht=true)"])
def test_more_than_2_31_elements(text: str) -> None:
    """Places are counted in 64 bits: what lies last is encoded as it is alone."""
    rows, cols = 2**16 + 128, 2**15
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16).repeat(1, cols // 256)
    x[-128, 0] = 1e4  # one amax for the whole and for its end
    whole, last = lpq.quantizer(text).quantize(x), lpq.quantizer(text).quantize(x[-128:])
    assert whole.numel() > 2**31
    assert whole.row is not None
    assert last.row is not None
    assert torch.equal(*as_bytes([whole.row.tensors()[0][-128:], last.row.tensors()[0]]))
    assert whole.col is not None
    assert last.col is not None
    if "row" not in text:  # there a column's scale is that of all its elements
        ends = whole.col.tensors()[0][-256:], last.col.tensors()[0][-256:]
        assert torch.equal(*as_bytes([ends[0][:, -ends[1].shape[1] :], ends[1]]))
