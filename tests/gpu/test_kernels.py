"""Every CUDA kernel and every Triton kernel gives the bytes of the reference: for any shape, dtype, alignment and
choice of operands."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fuzzed import (
    DTYPES,
    KINDS,
    assert_captured,
    assert_same,
    inputs,
    of_many_elements,
    quantize,
    seed,
    sides,
    unaligned_offset,
)
from quantizers import IN_KERNELS, SIDES
from torch import Tensor

import lpq
from lpq import operations
from lpq.core import Quantizer, Storage
from lpq.formats.random_bits import RandomBits
from lpq.kernels import choose, tiles
from lpq.operations.references import quantize_reference
from lpq.testing.calls import on as on_device
from lpq.testing.comparing import Poisoned, check_order

QUANTIZERS = {
    "cuda": [
        *IN_KERNELS,
        "mxfp8(dtype=e5m2)",
        "fp8(scaling=block, block=128x128, pow2=false)",
        "hybrid(row=fp8(scaling=block), col=fp8(scaling=block, dtype=e5m2))",
        "hybrid(row=fp8(scaling=row), col=mxfp8)",
    ],
    "triton": [*IN_KERNELS, "mxfp8(dtype=e5m2)", "hybrid(row=fp8, col=fp8(scaling=block, dtype=e5m2))"],
}
SHAPES = [
    (128, 128), (256, 512), (64, 384), (1, 1), (33, 80), (1, 1000), (1000, 1), (130, 257), (300, 136), (136, 300),
    (16, 4096), (31, 16), (257, 272), (0, 64), (64, 0),
]  # fmt: skip
ALIGNED, ODD, FEW = (256, 512), (130, 257), [(1, 1000), (1000, 1), (48, 80), (0, 64), (1, 1)]
"""The shapes for Triton, where each is a program of its own, which takes a second to compile."""
PLACED = tuple(kind for kind in KINDS if kind not in ("unaligned", "transposed"))
NEEDS = {"cuda": "cuda.core", "triton": "triton"}
LARGE = ["fp8", "fp8(scaling=row)", "mxfp8", "fp8(scaling=block)", "nvfp4(rht=true)"]
OTHERS_LARGE = ["fp8(scaling=delayed, dtype=e5m2)", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"]


def found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def on(backend: str, *values: Any) -> Any:
    missing = pytest.mark.skipif(not found(NEEDS[backend]), reason=f"needs {NEEDS[backend]}")
    return pytest.param(backend, *values, id="-".join(map(str, (backend, *values))), marks=missing)


def each(*names: str) -> Any:
    """A test of both backends, with these quantizers or with all of each."""
    pairs = [on(backend, text) for backend, texts in QUANTIZERS.items() for text in names or texts]
    return pytest.mark.parametrize(("backend", "text"), pairs, indirect=["backend"])


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its kernels are preferred to all others."""
    name: str = request.param
    if name == "triton":
        monkeypatch.setenv("LPQ_KERNELS", "triton")
    return name


class Case(NamedTuple):
    """Matrices to encode."""

    shape: tuple[int, int]
    row: bool
    col: bool
    kinds: tuple[str, ...] = KINDS
    given: tuple[str, ...] = ("normal", "nan", "unaligned")
    """Those that are also encoded with statistics of other matrices."""


def cases(backend: str, text: str, dtype: torch.dtype) -> Iterator[Case]:
    if backend == "cuda":
        yield from (Case(shape, *wanted) for shape, wanted in itertools.product(SHAPES, SIDES))
        return
    if dtype == torch.bfloat16:
        yield from (Case(ALIGNED, *wanted, KINDS, ()) for wanted in SIDES)
        yield Case(ODD, True, True, PLACED, ("normal",))
        if text in ("fp8(scaling=row)", "mxfp8", "nvfp4(rht=true, stochastic=true)"):
            yield from (Case(shape, True, True, PLACED, ()) for shape in FEW)
    else:
        yield Case(ALIGNED if dtype == torch.float16 else ODD, True, True, PLACED, ())


@each()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_equals_the_reference(backend: str, text: str, dtype: torch.dtype) -> None:
    """The statistics measured here or given, and asked for or not."""
    for case in cases(backend, text, dtype):
        row, col = sides(text, case.row, case.col)
        for name, x in inputs(*case.shape, dtype, case.kinds):
            others: list[Tensor | None] = [*operations.measure_reference(x * 0.5, row, col)]
            asked: list[tuple[list[Tensor | None], int, bool]] = [([], 0, False)]
            if name in case.given:
                cut = unaligned_offset(col)
                asked += [([], 16, True), (others, 0, True), (others, 32, False), ([None] * len(others), cut, True)]
            for stats, offset, measure in asked:
                expected = quantize_reference(x, stats, row, col, seed(), offset, measure)
                what = f"{row} {col} {case.shape} {name}, {len(stats)} statistics, {offset}, {measure}"
                got = quantize(x, stats, row, col, offset, measure)
                assert_same(got, expected, what)
                check_order(got, expected, what)


@each()
def test_measure_equals_the_reference(backend: str, text: str) -> None:
    for dtype in DTYPES:
        for case in cases(backend, text, dtype):
            row, col = sides(text, case.row, case.col)
            for name, x in inputs(*case.shape, dtype, case.kinds):
                with Poisoned():  # type: ignore[no-untyped-call]
                    got = operations.measure(x, row, col)
                what = f"{row} {col} {case.shape} {dtype} {name}"
                assert_same(got, operations.measure_reference(x, row, col), what)


@each()
def test_decode_and_transpose_equal_the_reference(backend: str, text: str) -> None:
    """Both operands; a rotated one too."""
    few = {ALIGNED: [torch.bfloat16], ODD: [torch.float16, torch.float32]}
    for shape, dtypes in (dict.fromkeys(SHAPES, DTYPES) if backend == "cuda" else few).items():
        for name, x in inputs(*shape, torch.float32, PLACED):
            for _, operand in lpq.quantizer(text).quantize(x, seed=1).operands:
                for dtype in dtypes:
                    compare_views(operand, dtype, f"{operand.quantizer} {shape} {dtype} {name}")


def compare_views(operand: Storage, dtype: torch.dtype, what: str) -> None:
    with Poisoned():  # type: ignore[no-untyped-call]
        got = operations.decode(operand, dtype)
    expected = operations.decode_reference(operand, dtype)
    assert_same([got.nan_to_num(7.0)], [expected.nan_to_num(7.0)], what)
    assert torch.equal(got.isnan(), expected.isnan()), what
    if operand.quantizer.transposable:
        with Poisoned():  # type: ignore[no-untyped-call]
            turned = operations.transpose(operand)
        assert turned.shape == operand.shape[::-1]
        assert_same(turned.tensors(), operations.transpose_reference(operand).tensors(), what)


@each("fp8", "mxfp8", "nvfp4", "nvfp4(block=16x16)", "nvfp4(rht=true)")
def test_a_slice_is_decoded_and_transposed(backend: str, text: str) -> None:
    """Its buffers are views that need not be contiguous, nor begin at multiples of 16 bytes."""
    ((_, x),) = inputs(256, 384, torch.float32, ("normal",))
    quantizer = lpq.quantizer(text)
    rotated = quantizer.quantize(x.t().contiguous(), row=False).col  # only column operands are
    whole = quantizer.quantize(x, col=False).row if quantizer.rotation is None else rotated
    assert whole is not None
    part = whole.narrow(1, 32, 384)
    assert part is not None
    below = part.narrow(0, 16, 256)
    assert below is not None
    for operand in (part, below):
        compare_views(operand, torch.bfloat16, f"{text} {operand.shape}")


TILES = {
    "cuda": [(128 * 17, 128 * 33), (128 * 66, 128 * 9), (128 * 17 + 16, 128 * 33), (256 * 27, 256 * 38)],
    "triton": [(2080, 1040)],
}


@pytest.mark.parametrize(
    ("backend", "text", "shape"),
    [on(backend, text, s) for backend, texts in QUANTIZERS.items() for text in texts for s in TILES[backend]],
    indirect=["backend"],
)
def test_many_tiles(backend: str, text: str, shape: tuple[int, int]) -> None:
    """From some size on tiles are broader."""
    row, col = sides(text, True, True)
    several = [*itertools.product([(row, col), (row, None), (None, col)], [False, True])]
    for dtype in (torch.bfloat16, torch.float16) if backend == "cuda" else (torch.bfloat16,):
        x = torch.randn(*shape, device="cuda", dtype=dtype)
        few_infinite = x.clone()
        few_infinite.flatten()[::9973], few_infinite.flatten()[7::9973] = torch.inf, -torch.inf
        asked = several if backend == "cuda" else several[:1]
        for given, ((by_row, by_col), measure) in [*((x, one) for one in asked), (few_infinite, several[0])]:
            expected = quantize_reference(given, [], by_row, by_col, seed(), 0, measure)
            got = quantize(given, [], by_row, by_col, 0, measure)
            assert_same(got, expected, f"{by_row} {by_col} {measure} {dtype} {given is x}")
    for _, operand in lpq.quantizer(text).quantize(x, seed=1).operands:
        if operand.quantizer.transposable:
            compare_views(operand, x.dtype, f"{operand.quantizer} {shape}")


@pytest.mark.parametrize(("backend", "text"), [on("cuda", text) for text in QUANTIZERS["cuda"]], indirect=["backend"])
def test_small_matrices_in_the_way_of_large_ones(backend: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By broad tiles, several of which a block of threads takes in turn.

    The references run on the CPU: compute-sanitizer makes each of their many launches slow."""
    monkeypatch.setattr(tiles, "MANY_TILES", 1)
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 1)
    row, col = sides(text, True, True)
    for shape in ((256, 256), (512, 768), (1024, 256), (384, 256)):
        for name, there in inputs(*shape, torch.bfloat16, ("normal", "nan", "infinite", "zeros", "wide range")):
            x = there.cpu()
            for by_row, by_col in ((row, col), (row, None), (None, col)):
                what = f"{by_row} {by_col} {shape} {name}"
                others: list[Tensor | None] = [*operations.measure_reference(x * 0.5, by_row, by_col)]
                for stats, measure in (([], False), ([], True), (others, True)):
                    expected = quantize_reference(x, stats, by_row, by_col, seed().cpu(), 0, measure)
                    got = quantize(there, on_device("cuda", stats), by_row, by_col, 0, measure)
                    assert_same(one_nan(got), one_nan(expected), f"{what} {len(stats)} {measure}")
                with Poisoned():  # type: ignore[no-untyped-call]
                    measured = operations.measure(there, by_row, by_col)
                expected = operations.measure_reference(x, by_row, by_col)
                assert_same(one_nan(measured), one_nan(expected), f"{what}, measured")
            if row is not None and row.transposable:
                operand = lpq.quantizer(text).quantize(there, col=False).row
                assert operand is not None
                compare_views(operand, x.dtype, f"{text} {shape} {name}")


def one_nan(tensors: list[Tensor]) -> list[Tensor]:
    """On the CPU; of floats that are statistics, processors differ in which NaN it is."""
    here = [t.cpu() for t in tensors]
    return [t.nan_to_num(torch.nan, torch.inf, -torch.inf) if t.dtype in DTYPES else t for t in here]


@each("fp8(scaling=block)", "fp8(scaling=block, dtype=e5m2)")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_power_of_two_for_every_amax(backend: str, text: str, dtype: torch.dtype) -> None:
    """Amaxes with every exponent, just below and above of where their scale takes the next one."""
    row, col = sides(text, True, True)
    exponents = torch.arange(256, device="cuda", dtype=torch.int32)[:, None] << 23
    around = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], device="cuda", dtype=torch.int32)
    amax = (exponents | around).view(torch.float32).reshape(-1, 1)
    for _, x in inputs(amax.numel(), 128, dtype, ("normal", "infinite")):
        for by_row, by_col, matrix in ((row, None, x), (None, col, x.t().contiguous())):
            expected = quantize_reference(matrix, [amax], by_row, by_col, seed(), 0, False)
            assert_same(quantize(matrix, [amax], by_row, by_col, 0, False), expected, f"{by_row} {by_col}")


@each("nvfp4", "nvfp4(stochastic=true)")
def test_every_number_at_every_scale(backend: str, text: str) -> None:
    """All bf16 numbers by blocks whose amaxes are of other tensors, so that products lie near and far of the grid."""
    row = lpq.quantizer(text).side("row")
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int16)
    x = bits.view(torch.bfloat16).reshape(256, 256).repeat(4, 1)
    g = torch.Generator("cuda").manual_seed(1)
    for power in range(-120, 127, 13):
        amax = torch.rand((), device="cuda", generator=g) * 2.0**power
        stats: list[Tensor | None] = [amax, amax * torch.rand(1024, 16, device="cuda", generator=g)]
        expected = quantize_reference(x, stats, row, None, seed(), 0, False)
        assert_same(quantize(x, stats, row, None, 0, False), expected, str(power))


@each("nvfp4", "nvfp4(block=16x16)")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_way_between_two_values(backend: str, text: str, dtype: torch.dtype) -> None:
    """Amaxes with every significand of bf16: it decides which elements lie half-way, where the even one is right."""
    row, col = sides(text, True, True)
    g = torch.Generator("cuda").manual_seed(2)
    met = torch.zeros(4, device="cuda", dtype=torch.int64)
    powers = (0, 3, -2, 1, -4) if dtype == torch.float16 else (0, 100, -117, -116, -115)  # where inverses are subnormal
    for significand in range(128, 256):
        amax = significand / 128 * 2.0 ** powers[significand % 5]
        parts = torch.randint(1, 128, (256, 128), device="cuda", generator=g) / 128
        blocks = torch.randint(128, 256, (16, 8), device="cuda", generator=g) / 256
        scales = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1) * amax
        signs = torch.randint(0, 2, parts.shape, device="cuda", generator=g) * 2 - 1
        x = (parts * scales * signs).to(torch.bfloat16 if significand % 2 else dtype).to(dtype)
        x[0, 0] = amax
        for by_row, by_col in ((row, None), (row, col)):
            expected = quantize_reference(x, [], by_row, by_col, seed(), 0, False)
            assert_same(quantize(x, [], by_row, by_col, 0, False), expected, f"{significand} {by_col}")
        _, scale, overall = expected[:3]
        high = 256 // scale.shape[0]
        of_block = 1 / (scale.float() * (1 / (2688 / overall)))
        v = x.float().abs() * of_block.repeat_interleave(high, 0).repeat_interleave(16, 1)
        met += torch.stack([(v == tie).sum() for tie in (0.25, 0.75, 1.25, 3.5)])
    assert met.all()


@each("nvfp4(stochastic=true)")
def test_where_a_random_sum_meets_the_grid(backend: str, text: str) -> None:
    """A sum is rounded before it is cut: magnitudes just above and below of what a random byte takes to the grid."""
    row = lpq.quantizer(text).side("row")
    byte = RandomBits(seed(), 0).bytes(1024, 128).float()
    grid = torch.tensor([0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cuda").repeat(16)
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0], device="cuda").repeat(16)
    off = torch.arange(-16, 16, device="cuda").repeat(32)[:, None] * torch.tensor([2.0**-27, 2.0**-28], device="cuda")
    x = grid - byte / 256 * step + off.repeat(1, 64)
    stats: list[Tensor | None] = [x.new_tensor(2688.0), x.new_full((1024, 8), 6.0)]  # so that nothing is scaled
    expected = quantize_reference(x, stats, row, None, seed(), 0, False)
    assert_same(quantize(x, stats, row, None, 0, False), expected, text)


@each()
def test_it_serves(backend: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may as well: each operand alone, and both together unless they are of two formats."""
    monkeypatch.setenv("LPQ_KERNELS", "cuda,triton,torch,reference" if backend == "cuda" else "triton,torch,reference")
    for wanted in SIDES:
        operands = [side for side in sides(text, *wanted) if side is not None]
        if len({type(side) for side in operands}) == 1:
            assert_served("quantize", operands, backend)
        if len(operands) == 1:
            (side,) = operands
            if side.stats:
                assert_served("measure", operands, backend)
            if side.transposable:
                assert_served("transpose", operands, backend)
            assert_served("decode", operands, backend)


def assert_served(op: str, operands: list[Quantizer], backend: str) -> None:
    choice = choose(op, tuple(side.text for side in operands), torch.device("cuda", 0))
    assert choice.backend == backend, (op, operands, choice.rejected)


@each()
def test_no_synchronisation_and_capture(backend: str, text: str) -> None:
    assert_captured(text)


@pytest.mark.parametrize(
    ("backend", "text"),
    [*(on(backend, text) for backend in QUANTIZERS for text in LARGE), *(on("cuda", text) for text in OTHERS_LARGE)],
    indirect=["backend"],
)
def test_more_than_2_31_elements(backend: str, text: str) -> None:
    """The last operand is encoded as it is alone."""
    whole, last = of_many_elements(text)
    assert whole.row is not None
    assert last.row is not None
    assert_same([whole.row.tensors()[0][-128:]], [last.row.tensors()[0]], text)
    assert_same([operations.decode(whole.row, whole.dtype)[-128:]], [operations.decode(last.row, last.dtype)], text)
    assert whole.col is not None
    assert last.col is not None
    if "row" not in text:  # there a column's scale is that of all its elements
        ends = whole.col.tensors()[0][-256:], last.col.tensors()[0][-256:]
        assert_same([ends[0][:, -ends[1].shape[1] :]], [ends[1]], text)
    if whole.row.quantizer.transposable:
        turned, end = (operations.transpose(operand).tensors()[0] for operand in (whole.row, last.row))
        assert_same([turned[:, -end.shape[1] :]], [end], f"{text}, transposed")
