"""Every Triton kernel gives the bytes of the reference, and of the CUDA kernels, on the GPU that is here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lpq
from lpq.core import Quantizer, operations
from lpq.ops import choose
from lpq.testing.conformance.test_kernels import Poisoned

pytest.importorskip("triton", reason="needs Triton")
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
    "hybrid(row=fp8, col=fp8(scaling=block, dtype=e5m2))",
    "mxfp8",
    "mxfp8(dtype=e5m2)",
    "hybrid(row=mxfp8, col=mxfp8(dtype=e5m2))",
    "nvfp4",
    "nvfp4(block=16x16)",
    "nvfp4(stochastic=true)",
    "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)",
    "nvfp4(block=16x16, stochastic=true)",
    "nvfp4(block=16x16, rht=true)",
]
TRANSPOSED = ["fp8", "fp8(dtype=e5m2)", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"]
ALIGNED, ODD = (256, 512), (130, 257)
SHAPES = [(1, 1000), (1000, 1), (48, 80), (0, 64), (1, 1)]
SIDES = [(True, True), (True, False), (False, True)]
SEED = -12345678901


@pytest.fixture(autouse=True)
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "triton")


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
    if (rows, cols) != ALIGNED or dtype != torch.bfloat16:
        return
    yield "unaligned", torch.cat([x.new_zeros(1), x.flatten()]).to(dtype)[1:].view(rows, cols)
    yield "transposed", x.t().contiguous().to(dtype).t()


def sides(text: str, row: bool, col: bool) -> tuple[Quantizer | None, Quantizer | None]:
    quantizer = lpq.quantizer(text)
    return (quantizer.side("row") if row else None), (quantizer.side("col") if col else None)


def quantize(
    x: Tensor, stats: list[Tensor | None], row: Quantizer | None, col: Quantizer | None, offset: int, measure: bool
) -> list[Tensor]:
    texts = (row.text if row else "", col.text if col else "")
    with Poisoned():  # type: ignore[no-untyped-call]
        out: list[Tensor] = torch.ops.lpq.quantize(x, stats, *texts, torch.tensor(SEED, device="cuda"), offset, measure)
    return out


def assert_same(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape, what
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(one, other), f"{what}, output {i}: {int((one != other).sum())} of {one.numel()} bytes"


def cases(text: str) -> Iterator[tuple[tuple[int, int], torch.dtype, bool, bool]]:
    """Shapes, dtypes and wanted operands. Each is a program of its own, which takes a second to compile: a matrix that
    is aligned, one that is not, and for a few quantizers those of one row and of one column."""
    for row, col in SIDES:
        yield ALIGNED, torch.bfloat16, row, col
    yield ODD, torch.bfloat16, True, True
    yield ALIGNED, torch.float16, True, True
    yield ODD, torch.float32, True, True
    for shape in SHAPES if text in ("fp8(scaling=row)", "mxfp8", "nvfp4(rht=true, stochastic=true)") else ():
        yield shape, torch.bfloat16, True, True


@pytest.mark.parametrize("text", QUANTIZERS)
def test_quantize_equals_the_reference(text: str) -> None:
    """The statistics measured here or given, and asked for or not."""
    seed = torch.tensor(SEED, device="cuda")
    for shape, dtype, by_row, by_col in cases(text):
        row, col = sides(text, by_row, by_col)
        for name, x in inputs(*shape, dtype):
            others = operations.measure_reference(x * 0.5, row, col)
            asked: list[tuple[list[Tensor | None], int, bool]] = [([], 0, False)]
            if name == "normal" and (shape, dtype) == (ODD, torch.bfloat16):
                asked += [([], 16, True), ([*others], 0, True), ([*others], 32, False), ([None] * len(others), 5, True)]
            for stats, offset, measure in asked:
                expected = operations.quantize_reference(x, stats, row, col, seed, offset, measure)
                what = f"{row} {col} {shape} {dtype} {name}, {len(stats)} statistics, {offset}, {measure}"
                assert_same(quantize(x, stats, row, col, offset, measure), expected, what)


@pytest.mark.parametrize("text", QUANTIZERS)
def test_measure_equals_the_reference(text: str) -> None:
    for shape, dtype, by_row, by_col in cases(text):
        row, col = sides(text, by_row, by_col)
        for name, x in inputs(*shape, dtype):
            with Poisoned():  # type: ignore[no-untyped-call]
                got = operations.measure(x, row, col)
            assert_same(got, operations.measure_reference(x, row, col), f"{row} {col} {shape} {dtype} {name}")


@pytest.mark.parametrize("text", QUANTIZERS)
def test_decode_and_transpose_equal_the_reference(text: str) -> None:
    """Of both operands; a rotated one too."""
    for shape, dtype in ((ALIGNED, torch.bfloat16), (ODD, torch.float16), (ODD, torch.float32)):
        for name, x in inputs(*shape, torch.float32):
            for operand in (o for _, o in lpq.quantizer(text).quantize(x, seed=1).operands):
                what = f"{operand.quantizer} {shape} {dtype} {name}"
                with Poisoned():  # type: ignore[no-untyped-call]
                    got = operations.decode(operand, dtype)
                expected = operations.decode_reference(operand, dtype)
                assert_same([got.nan_to_num(7.0)], [expected.nan_to_num(7.0)], what)
                assert torch.equal(got.isnan(), expected.isnan()), what
                if text in TRANSPOSED:
                    with Poisoned():  # type: ignore[no-untyped-call]
                        turned = operations.transpose(operand)
                    assert_same(turned.tensors(), operations.transpose_reference(operand).tensors(), what)


@pytest.mark.parametrize("text", QUANTIZERS)
def test_quantize_equals_the_cuda_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a matrix of many tiles."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        pytest.skip("needs cuda-core")
    row, col = sides(text, True, True)
    x = torch.randn(2048 + 32, 1024 + 16, device="cuda", dtype=torch.bfloat16)
    got = quantize(x, [], row, col, 0, False)
    monkeypatch.setenv("LPQ_KERNELS", "cuda,reference")
    assert_same(got, quantize(x, [], row, col, 0, False), text)


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
        assert_same(a.tensors(), b.tensors(), text)


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
    assert_same([whole.row.tensors()[0][-128:]], [last.row.tensors()[0]], text)
    assert_same([operations.decode(whole.row, x.dtype)[-128:]], [operations.decode(last.row, x.dtype)], text)
    assert whole.col is not None
    assert last.col is not None
    if "row" not in text:  # there a column's scale is that of all its elements
        ends = whole.col.tensors()[0][-256:], last.col.tensors()[0][-256:]
        assert_same([ends[0][:, -ends[1].shape[1] :]], [ends[1]], text)


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4"])
def test_triton_serves_where_cuda_may_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "triton,torch,reference")
    for op in ("measure", "quantize", "decode"):
        assert choose(op, (lpq.quantizer(text).text,), torch.device("cuda", 0)).backend == "triton"
