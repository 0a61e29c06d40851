"""Every CUDA kernel gives the bytes of the reference where a CPU imitates the GPU (``imitated``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import imitated
import lpq_fp8.cuda
import pytest
import torch
from support.comparing import expect_bytes
from tile_sides import on_cuda, serves, side_of
from torch import Tensor

import lpq
from lpq import operations, registry
from lpq.core import Quantizer
from lpq.formats.format import DIRECTIONS
from lpq.kernels import host_to_device, nvrtc_cache, products, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.operations import derived_operands
from lpq.operations.binding import Encoding, cached_by_shape, operand_like
from lpq.operations.derived_operands import Derived
from lpq.operations.fused_pair import Pair
from lpq.operations.recoding import bind_sides
from lpq.operations.references import quantize_reference
from lpq.testing.calls import RAGGED, matrices, of_all_sizes
from lpq.testing.comparing import Poisoned
from lpq.testing.conformance.test_kernels import FEW, SIZES
from lpq.testing.expect import same_operand
from lpq.testing.kernel_checks import check_of, pairs
from lpq.testing.operands import SEED, encode, normal
from lpq.testing.options import family
from lpq.testing.table import DTYPES

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
OPS = ("measure", "quantize", "decode", "transpose", "exact", "remember")
"""Operations whose kernels take one tensor, on whatever device it is."""
EDEN = "nvfp4(stochastic=eden)"
BY_TILES = (
    ("fp8", "mxfp8"), ("mxfp8", "fp8(scaling=block)"), ("fp8(scaling=block)", "nvfp4"), ("nvfp4", "fp8(scaling=row)"),
    ("fp8(scaling=row)", "nvfp4(rht=true, stochastic=true)"), ("nvfp4(rht=true, stochastic=true)", "fp8"),
    ("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), (EDEN, EDEN), ("mxfp4", "nvfp4"),
    ("mxfp8", "mxfp4(scale=ceil, rht=true, stochastic=true)"),
)  # fmt: skip
"""Each on both sides, beside another format, and the pairs of which recipes are made: sides know nothing of each other,
and every pair takes some seconds to compile. On a GPU all are tried."""
BROAD = (
    "fp8",
    "fp8(scaling=row)",
    "fp8(scaling=block)",
    "fp8(scaling=block, block=128x128)",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)

SHOWN = ("fp8(scaling=delayed, pow2=false)", "fp8(scaling=delayed, pow2=true)")
"""Quantizers whose options other quantizers here have, one each. On a GPU they are tried."""
QUANTIZERS = [
    pytest.param(quantizer.text, i, id=quantizer.text)
    for name in registry.formats()
    for i, quantizer in enumerate(family(name).quantizers)
    if on_cuda("quantize", quantizer) is not None and quantizer.text not in SHOWN
]
QUANTIZERS += [
    pytest.param(text, i, id=text)
    for i, text in enumerate((
        "nvfp4(search=four_over_six, error=mae, norm=256)", "nvfp4(block=16x16, search=four_over_six)",
        "nvfp4(rht=true, search=four_over_six, norm=256)", "nvfp4(scaling=row)",
        "nvfp4(scaling=row, search=four_over_six, norm=256)", "nvfp4(scaling=row, stochastic=unbiased)",
    ), start=1)
]  # fmt: skip
"""All that the conformance kit tries, and options that it does not, none of them as a format's first."""


def few(i: int, op: str, sides: tuple[Quantizer | None, Quantizer | None]) -> Iterator[tuple[str, Tensor]]:
    """Matrices for operands of the quantizer of this number, of which the first has the default options.

    Every new kind of tile takes a second to compile: so the others are tried on fewer, each in one dtype, and one
    operand alone with every second quantizer. An amax is remembered, and the check itself takes steps with all
    kinds of amaxes.
    """
    if op == "remember":
        yield "normal values", normal(*RAGGED)
        return
    alone = op in ("quantize", "measure") and None in sides
    dtype = DTYPES[i % len(DTYPES)]
    if i == 0:
        yield from matrices(DTYPES[:1] if alone else DTYPES, FEW)
    elif not alone or (sides[0] is None) == bool(i % 2):
        yield SIZES, of_all_sizes(dtype)
        x = normal(*RAGGED, dtype=dtype)
        x[3, 70], x[20, 5] = torch.inf, torch.nan
        yield "one infinite, one NaN", x
        if not alone:
            yield "whole tiles", normal(128, 256, dtype=dtype)


@pytest.mark.parametrize(("text", "i"), QUANTIZERS)
def test_kernels_equal_the_reference(text: str, i: int, launched: list[str]) -> None:
    """In all options, for all operations."""
    quantizer = lpq.quantizer(text)
    served = set()
    for op in OPS:
        kernel = on_cuda(op, quantizer)
        for row, col in pairs(kernel, quantizer) if kernel is not None else ():
            assert kernel is not None
            sides = tuple(side for side in (row, col) if side is not None)
            if not serves(kernel, *sides):
                continue
            compared = [
                check_of(kernel).compare(kernel, row, col, x, "cpu", name)
                for name, x in few(i, op, (row, col))
                if not check_of(kernel).sums or name != SIZES
            ]
            compared.append(check_of(kernel).views(kernel, row, col, "cpu"))
            if any(compared):
                served.add(op)
    assert served >= {"quantize", "measure", "decode"}
    assert ({"encode_eden", "decode_eden"} if text == EDEN else {"quantize", "decode_tiles"}) <= {*launched}


@pytest.mark.parametrize(("first", "second"), BY_TILES)
def test_two_formats_from_one_read(first: str, second: str, launched: list[str]) -> None:
    row, col, seed = lpq.quantizer(first).side("row"), lpq.quantizer(second).side("col"), torch.tensor(SEED)
    pair = Pair(side_of(row, "row"), side_of(col, "col"))
    whole = first == "mxfp8" or second == "mxfp8"  # it takes a second more for each pair
    for x in (of_all_sizes(torch.bfloat16), normal(*RAGGED), *([normal(256, 128)] if whole else [])):
        with Poisoned():
            got = cached_by_shape(pair.bind)(x, [], row, col, seed, 0, False)
        what = f"{first} with {second}, {list(x.shape)}"
        expect_bytes(got, quantize_reference(x, [], row, col, seed, 0, False), what)
    assert "pair" in launched


@pytest.mark.parametrize(
    "text", ["mxfp8", "mxfp8(dtype=e5m2)", "mxfp4", "fp8(scaling=block)", "fp8(scaling=block, pow2=false)"]
)
def test_column_operands_that_are_made_of_codes(text: str, launched: list[str]) -> None:
    """They equal the column operands of the decoded row operand, wherever the row operand lies in memory."""
    q = lpq.quantizer(text)
    kernel = on_cuda("reader", q)
    assert kernel is not None
    reader, side = registry.resolve(kernel.impl)(q), side_of(q.side("col"), "col")
    odd = normal(*RAGGED)
    odd[3, 70], odd[20, 5] = torch.nan, torch.inf
    for x in (normal(256, 128), odd, of_all_sizes(torch.bfloat16), of_all_sizes(torch.float32)):
        whole = encode(q, x)
        recode = bind_sides(reader, side, operand_like(whole), q, torch.device("cpu"))
        assert recode is not None
        expected = quantize_reference(whole.decode(), [], None, q, None, 0, False)
        for operand in (whole, whole.map(lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]), whole.row_major()):
            with Poisoned():
                got = recode(operand.tensors())
            expect_bytes(got, expected, f"{text}, {list(x.shape)} {x.dtype}")
    assert "recode" in launched


@pytest.mark.parametrize(
    "text",
    [
        "mxfp8", "mxfp4", "mxfp4(scale=ceil, rht=true, stochastic=true)", "nvfp4", "nvfp4(block=16x16)",
        "nvfp4(rht=true, stochastic=true)", "nvfp4(search=four_over_six, norm=256)", EDEN,
    ],
)  # fmt: skip
def test_exact_forms_that_are_made_at_once(text: str) -> None:
    """Are to the bit those of encoded operands."""
    quantizer = lpq.quantizer(text)
    exact = next(k for k in registry.kernels("exact", (text.partition("(")[0],)) if k.backend == "torch")
    row, col, seed = quantizer.side("row"), quantizer.side("col"), torch.tensor(SEED)
    made = Pair(side_of(row, "row", "exact_tile"), side_of(col, "col", "exact_tile"))
    for x in (normal(48, 80), normal(256, 128)):
        shape = x.shape[0], x.shape[1]
        if not row.whole(shape[1]):
            continue
        how = made.bind(
            Encoding(row, col, shape, x.dtype, x.dtype, x.device, exact=(True, True), apart=True, dispatched=True)
        )
        assert how is not None
        with Poisoned():
            *both, _ = how(x, x.data_ptr(), (), seed)
        for got, side, direction in zip(both, (row, col), DIRECTIONS, strict=True):
            operand = encode(side, x if direction == "row" else x.t().contiguous(), direction=direction, seed=SEED)
            form = registry.resolve(exact.impl)(operand)
            wanted = [form.matrix] if form.factor is None else [form.matrix, form.factor]
            expect_bytes(got, wanted, f"{direction} of {text}, {list(x.shape)}")


@pytest.mark.parametrize("text", BROAD)
def test_tiles_of_large_matrices(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MANY_TILES", 1)
    quantizer, x = lpq.quantizer(text), normal(512, 256)
    x[300, 100], x[5, 200] = torch.inf, torch.nan
    for op in ("quantize", "measure", "transpose"):
        kernel = on_cuda(op, quantizer)
        if kernel is not None and (op != "transpose" or quantizer.transposable):
            row, col = quantizer.side("row"), quantizer.side("col")
            check = check_of(kernel)
            assert check.compare(kernel, row, None if op == "transpose" else col, x, "cpu", "broad tiles")
            if op == "quantize":
                assert check.compare(kernel, row, None, x, "cpu", "broad tiles")


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"])
@pytest.mark.parametrize("size", [(128, 256), (33, 70)])
def test_transposes_are_written_to_given_memory(
    text: str, size: tuple[int, int], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = lpq.quantizer(text)
    kernel = on_cuda("transpose", quantizer)
    assert kernel is not None
    assert kernel.bind is not None
    bind = registry.resolve(kernel.bind)
    monkeypatch.setattr(derived_operands, "_bound", lambda operand, device: bind(operand, device))
    row = encode(quantizer.side("row"), normal(*size))
    expected = operations.transpose_reference(row).map(torch.Tensor.contiguous)
    out = expected.map(torch.empty_like)
    for buffer in out.tensors():
        buffer.view(-1).view(torch.uint8).fill_(0xA5)
    (derive,) = derived_operands.bind_derive_into([Derived(quantizer, row, out.tensors())], torch.device("cpu"))
    derive()
    assert len(launched) == 1
    same_operand(out, expected, f"{text}, {size}")


@pytest.mark.parametrize("size", [(128, 128), (300, 700), (512, 1100)])
def test_scales_of_squares_lie_as_products_read_them(size: tuple[int, int]) -> None:
    """A layer's own encoding leaves room at the end of each line, and what is given or measured has none."""
    quantizer, x = lpq.quantizer("fp8(scaling=block, block=128x128)"), normal(*size)
    (amaxes,) = operations.measure_reference(x, quantizer, quantizer)
    expected = quantize_reference(x, [], quantizer, quantizer, None, 0, True)
    for given, measure in ((False, False), (False, True), (True, False)):
        e = Encoding(quantizer, quantizer, size, x.dtype, x.dtype, x.device, given=(given,), measure=measure)
        with Poisoned():
            row, col, measured = lpq_fp8.cuda.bind(e)(x, x.data_ptr(), (amaxes if given else None,), None)
        assert [t.stride(0) % 4 for t in (row[1], col[1])] == [0, 0]
        got = (*row, *col, *measured)
        expect_bytes(got, expected[: len(got)], f"{size}, given {given}, measure {measure}")


def test_words_of_the_host() -> None:
    """More than one launch carries."""
    numbers = torch.randn(2 * host_to_device.WORDS + 5)
    assert torch.equal(host_to_device.write_words(numbers, torch.device("cpu")), numbers)


def test_factors_of_a_product() -> None:
    left, right, out = torch.tensor(3.0), torch.tensor(0.7), torch.full((2,), torch.nan)
    for pointers, expected in (((left, right), 3.0 * 0.25 * right), ((None, right), 0.25 * right)):
        given = (0 if t is None else t.data_ptr() for t in pointers)
        products.SCALARS.launch(0, (), 1, *given, 0.25, out.data_ptr())
        assert out.tolist() == [float(expected), 0.0]


# ---------------------------------------------------------------------------------------------- the imitation itself


def kernel_of(folder: Path, body: str) -> CudaKernel:
    folder.mkdir(exist_ok=True)
    source = folder / "own.cu"
    source.write_text(
        '#include "numbers.cuh"\n'
        'extern "C" __global__ void own(unsigned* out) {\n'
        "    __shared__ unsigned shared[64];\n"
        f"    {body}\n"
        "}\n"
    )
    return CudaKernel(source, "own", "P", threads=64)


def run(kernel: CudaKernel, backwards: bool) -> list[int]:
    out = torch.full((64,), -1, dtype=torch.int32)
    imitated.launch(kernel, (), 1, (out.data_ptr(),), backwards=backwards)
    return out.tolist()


SAY = "shared[threadIdx.x] = threadIdx.x; {wait} out[threadIdx.x] = shared[63 - threadIdx.x];"
COPY = """
    __shared__ uint4 piece;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(&piece)), "l"(out));
    {wait}
    out[4 + threadIdx.x % 60] = piece.x;
"""
NOBODYS = 0xA5A5A5A5 - (1 << 32)


@pytest.mark.parametrize("backwards", [False, True])
def test_threads_wait_and_talk(backwards: bool, tmp_path: Path) -> None:
    """A wait that is missing is noticed, also where the threads of a warp have waited for each other."""
    told = kernel_of(tmp_path / "a", "out[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 16);")
    assert run(told, backwards) == [i ^ 16 for i in range(64)]
    for wait, right in (("__syncthreads();", True), ("__syncwarp();", False)):
        found = run(kernel_of(tmp_path / wait, SAY.format(wait=wait)), backwards)
        assert (found == list(range(63, -1, -1))) == right


def test_a_copy_is_there_when_it_was_waited_for_and_what_nobody_wrote_is_noticed(tmp_path: Path) -> None:
    waits = COPY.format(wait='asm volatile("cp.async.wait_all;" ::: "memory");')
    assert run(kernel_of(tmp_path / "a", waits), False)[4] == -1
    assert run(kernel_of(tmp_path / "b", COPY.format(wait="")), False)[4] == NOBODYS
    assert {*run(kernel_of(tmp_path / "c", "out[threadIdx.x] = shared[threadIdx.x];"), False)} == {NOBODYS}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("__stcs((uint4*)(out + 1), make_uint4(0, 0, 0, 0));", "not aligned"),
        ("__ldcs((const uint2*)(out + 1));", "not aligned"),
        ("extern __shared__ uint4 dynamic[]; dynamic[0] = make_uint4(1, 2, 3, 4);", "more shared memory is written"),
        ("if (threadIdx.x % 2) __syncthreads(); __syncwarp();", "threads wait for others for ever"),
    ],
)
def test_what_a_gpu_refuses_is_told(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(kernel_of(tmp_path, body), False)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], str]], None]]:
    """Sources are compiled as some function changes them."""
    original = imitated.translated

    def change(by: Callable[[str], str]) -> None:
        imitated.library.cache_clear()
        monkeypatch.setattr(imitated, "translated", lambda text: original(by(text)))
        monkeypatch.setattr(imitated, "folder", imitated.folder.__wrapped__)

    yield change
    imitated.library.cache_clear()


Change = Callable[[Callable[[str], str]], None]


def assert_noticed(op: str, text: str, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison that all kernels pass."""
    monkeypatch.setitem(imitated.TURNS, ..., itertools.repeat(backwards))
    with pytest.raises(AssertionError, match=r"output \d: .* differ"):
        compared(op, text)


def compared(op: str, text: str) -> bool:
    quantizer = lpq.quantizer(text)
    kernel = on_cuda(op, quantizer)
    assert kernel is not None
    row, col = quantizer.side("row"), quantizer.side("col")
    return check_of(kernel).compare(kernel, row, col, normal(150, 200), "cpu", "normal values")


def test_a_kernel_that_is_wrong_is_noticed(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the right one is kept, of which a header alone is another."""
    assert compared("quantize", "mxfp8")
    changed(lambda text: text.replace("store_row(t, p.data, i, low, high)", "store_row(t, p.data, i, low, high ^ 1)"))
    assert_noticed("quantize", "mxfp8", False, monkeypatch)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("op", "text", "file", "which"),
    [
        ("measure", "fp8(scaling=block)", "blocks.cu", 0),
        *(("measure", text, "amaxes.cu", 1) for text in ("nvfp4", "nvfp4(rht=true)")),
        ("quantize", "fp8(scaling=block)", "vector.cu", 2),
        *(("quantize", text, "quantize.cu", which) for text in ("mxfp8", "mxfp4", "nvfp4") for which in (0, 1)),
    ],
)
def test_a_wait_that_is_left_out_of_a_kernel_is_noticed(
    op: str, text: str, file: str, which: int, backwards: bool, changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wait = (nvrtc_cache.csrc() / text.partition("(")[0] / file).read_text(), "__syncthreads();"
    parts = source.split(wait)
    without = wait.join(parts[: which + 1]) + ";" + wait.join(parts[which + 1 :])
    assert len(without) == len(source) - len(wait) + 1
    changed(lambda text: without if text == source else text)
    assert_noticed(op, text, backwards, monkeypatch)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_eden(direction: str, launched: list[str]) -> None:
    """Each operand alone, as its kernel makes it, in ragged groups and whole ones, also of a shard."""
    quantizer = lpq.quantizer("nvfp4(stochastic=eden)")
    sides = (quantizer, None) if direction == "row" else (None, quantizer)
    kernel = on_cuda("quantize", quantizer)
    assert kernel is not None
    encode_in_cuda, seed = registry.resolve(kernel.impl), torch.tensor(-(7 << 40) + 12345)
    odd = normal(140, 300) * torch.logspace(-30, 30, 300)
    odd[3, 270], odd[20, 5], odd[130, 140] = torch.inf, torch.nan, -torch.inf
    given = torch.tensor(0.25)
    for x, stats, offset, dtype in (
        (normal(140, 300, dtype=torch.bfloat16), [], 0, torch.bfloat16), (odd, [], 0, torch.float32),
        (normal(128, 256), [given], 256, torch.bfloat16), (torch.zeros(16, 128), [], 0, torch.float32),
        (normal(130, 33, dtype=torch.float16) / 4096, [], 128, torch.float16), (odd[40:, :120], [], 0, torch.float32),
        (odd, [given], 0, torch.float32),
    ):  # fmt: skip
        with Poisoned():
            got = encode_in_cuda(x, stats, *sides, seed, offset, True, dtype)
        expect_bytes(got, quantize_reference(x.to(dtype), stats, *sides, seed, offset, True), f"{direction}, {x.shape}")
    assert launched.count("encode_eden") == 7
