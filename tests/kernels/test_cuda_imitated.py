"""Every CUDA kernel gives the bytes of the reference where a CPU imitates the GPU (``imitated``)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import imitated
import lpq_fp8.cuda
import pytest
import torch
from torch import Tensor

import lpq
from lpq import operations, registry
from lpq.core import Quantizer
from lpq.kernels import host_to_device, nvrtc_cache, products, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.operations import derived_operands
from lpq.operations.binding import Encoding, operand_like, unbound
from lpq.operations.derived_operands import Derived
from lpq.operations.fused_pair import Pair
from lpq.operations.quantizing import quantize_reference
from lpq.operations.recoding import bind_sides
from lpq.registry import KernelSpec
from lpq.testing.calls import RAGGED, matrices, of_all_sizes
from lpq.testing.comparing import Poisoned
from lpq.testing.conformance.test_kernels import FEW, SIZES
from lpq.testing.expect import same, same_operand
from lpq.testing.kernel_checks import check_of, compare, compare_views, pairs
from lpq.testing.operands import SEED, encode, normal
from lpq.testing.options import family
from lpq.testing.table import DTYPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not imitated.found(), reason="needs g++, which compiles CUDA sources for a CPU"),
]
OPS = ("measure", "quantize", "decode", "transpose", "exact", "remember")
"""Operations whose kernels take one tensor, on whatever device it is."""
BY_TILES = (
    ("fp8", "mxfp8"), ("mxfp8", "fp8(scaling=block)"), ("fp8(scaling=block)", "nvfp4"), ("nvfp4", "fp8(scaling=row)"),
    ("fp8(scaling=row)", "nvfp4(rht=true, stochastic=true)"), ("nvfp4(rht=true, stochastic=true)", "fp8"),
    ("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"),
)  # fmt: skip
"""Each on both sides, beside another format, and the pairs of which recipes are made: sides know nothing of each other,
and every pair takes some seconds to compile. On a GPU all are tried."""
BROAD = ("fp8", "fp8(scaling=row)", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4")
TURNS: dict[object, Iterator[bool]] = defaultdict(lambda: itertools.cycle((False, True)))


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Launches are imitated, every second one of a kernel backwards, on a GPU of two multiprocessors; their names."""
    names = set()

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        names.add(self.name)
        turns = TURNS[... if ... in TURNS else (self.source, macros, self.name)]
        imitated.launch(self, macros, blocks, arguments, backwards=next(turns))

    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 2)
    with imitated.in_place_of_launches(launch):
        yield names


def on_cuda(op: str, name: str) -> KernelSpec | None:
    """The CUDA kernel of a format for an operation."""
    found = (k for plugin in registry.plugins() for k in plugin.kernels if name in k.formats)
    return next((k for k in found if k.op == op and k.backend == "cuda"), None)


QUANTIZERS = [
    pytest.param(quantizer.text, i, id=quantizer.text)
    for name in registry.formats()
    if on_cuda("quantize", name) is not None
    for i, quantizer in enumerate(family(name).quantizers)
]
QUANTIZERS += [
    pytest.param(text, i, id=text)
    for i, text in enumerate((
        "nvfp4(search=four_over_six, error=mae, norm=256)", "nvfp4(block=16x16, search=four_over_six)",
        "nvfp4(rht=true, search=four_over_six, norm=256)", "nvfp4(scaling=row)",
        "nvfp4(scaling=row, search=four_over_six, norm=256)",
    ))
]  # fmt: skip
"""All that the conformance kit tries, and options that it does not."""


def few(i: int, op: str, sides: tuple[Quantizer | None, Quantizer | None]) -> Iterator[tuple[str, Tensor]]:
    """Matrices for operands of the quantizer of this number, of which the first has the default options.

    Every new kind of tile takes a second to compile: so the others are tried on fewer, each in one dtype, and one
    operand alone with every second quantizer.
    """
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
def test_kernels_equal_the_reference(text: str, i: int, launched: set[str]) -> None:
    """In all options, for all operations."""
    quantizer = lpq.quantizer(text)
    served = set()
    for op in OPS:
        kernel = on_cuda(op, registry.format_of(type(quantizer)).name)
        for row, col in pairs(kernel, quantizer) if kernel is not None else ():
            assert kernel is not None
            sides = tuple(side for side in (row, col) if side is not None)
            if kernel.why_not is not None and registry.resolve(kernel.why_not)(*sides) is not None:
                continue
            compared = [
                compare(kernel, row, col, x, "cpu", name)
                for name, x in few(i, op, (row, col))
                if not check_of(kernel).sums or name != SIZES
            ]
            compared.append(compare_views(kernel, row, col, "cpu"))
            if any(compared):
                served.add(op)
    assert served >= {"quantize", "measure", "decode"}
    assert {"quantize", "decode_tiles"} <= launched


def tile_side(text: str, direction: str, op: str = "tile") -> object:
    quantizer = lpq.quantizer(text)
    kernel = on_cuda(op, registry.format_of(type(quantizer)).name)
    assert kernel is not None
    return registry.resolve(kernel.impl)(quantizer.side(direction), direction)  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "second"), BY_TILES)
def test_two_formats_from_one_read(first: str, second: str, launched: set[str]) -> None:
    pair = Pair(tile_side(first, "row"), tile_side(second, "col"))  # type: ignore[arg-type]
    row, col, seed = lpq.quantizer(first).side("row"), lpq.quantizer(second).side("col"), torch.tensor(SEED)
    whole = first == "mxfp8" or second == "mxfp8"  # it takes a second more for each pair
    for x in (of_all_sizes(torch.bfloat16), normal(*RAGGED), *([normal(256, 128)] if whole else [])):
        expected = quantize_reference(x, [], row, col, seed, 0, False)
        with Poisoned():  # type: ignore[no-untyped-call]
            got = unbound(pair.bind)(x, [], row, col, seed, 0, False)
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, f"{first} with {second}, {list(x.shape)}, output {i}")
    assert "pair" in launched


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8(dtype=e5m2)", "fp8(scaling=block)", "fp8(scaling=block, pow2=false)"])
def test_column_operands_that_are_made_of_codes(text: str, launched: set[str]) -> None:
    """Are those of the decoded row operand, wherever that lies in memory."""
    q = lpq.quantizer(text)
    kernel = on_cuda("reader", registry.format_of(type(q)).name)
    assert kernel is not None
    reader, side = registry.resolve(kernel.impl)(q), tile_side(text, "col")
    odd = normal(*RAGGED)
    odd[3, 70], odd[20, 5] = torch.nan, torch.inf
    for x in (normal(256, 128), odd, of_all_sizes(torch.bfloat16), of_all_sizes(torch.float32)):
        whole = encode(q, x)
        recode = bind_sides(reader, side, operand_like(whole), q, torch.device("cpu"))  # type: ignore[arg-type]
        assert recode is not None
        expected = quantize_reference(whole.decode(), [], None, q, None, 0, False)
        for operand in (whole, whole.map(lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]), whole.row_major()):
            with Poisoned():  # type: ignore[no-untyped-call]
                got = recode(operand.tensors())
            for i, (one, other) in enumerate(zip(got, expected, strict=True)):
                same(one, other, f"{text}, {list(x.shape)} {x.dtype}, output {i}")
    assert "recode" in launched


@pytest.mark.parametrize(
    "text",
    [
        "mxfp8", "nvfp4", "nvfp4(block=16x16)", "nvfp4(rht=true, stochastic=true)",
        "nvfp4(search=four_over_six, norm=256)",
    ],
)  # fmt: skip
def test_exact_forms_that_are_made_at_once(text: str) -> None:
    """Are to the bit those of encoded operands."""
    quantizer = lpq.quantizer(text)
    name = registry.format_of(type(quantizer)).name
    exact = next(k for k in registry.kernels("exact", (name,)) if k.backend == "torch")
    made = Pair(*(tile_side(text, direction, "exact_tile") for direction in ("row", "col")))  # type: ignore[arg-type]
    row, col, seed = quantizer.side("row"), quantizer.side("col"), torch.tensor(SEED)
    for x in (normal(48, 80), normal(256, 128)):
        shape = x.shape[0], x.shape[1]
        encoding = Encoding(
            row, col, shape, x.dtype, x.dtype, x.device, exact=(True, True), apart=True, dispatched=True
        )
        how = made.bind(encoding)
        assert how is not None
        with Poisoned():  # type: ignore[no-untyped-call]
            *both, _ = how(x, x.data_ptr(), (), seed)
        for got, side, direction in zip(both, (row, col), ("row", "col"), strict=True):
            operand = encode(side, x if direction == "row" else x.t().contiguous(), direction=direction, seed=SEED)
            form = registry.resolve(exact.impl)(operand)
            wanted = [form.matrix] if form.factor is None else [form.matrix, form.factor]
            for one, other in zip(got, wanted, strict=True):
                same(one, other, f"{direction} of {text}, {list(x.shape)}")


@pytest.mark.parametrize("text", BROAD)
def test_tiles_of_large_matrices(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MANY_TILES", 1)
    quantizer = lpq.quantizer(text)
    name = registry.format_of(type(quantizer)).name
    x = normal(512, 256)
    x[300, 100], x[5, 200] = torch.inf, torch.nan
    for op in ("quantize", "measure", "transpose"):
        kernel = on_cuda(op, name)
        if kernel is not None and (op != "transpose" or quantizer.transposable):
            row, col = quantizer.side("row"), quantizer.side("col")
            assert compare(kernel, row, None if op == "transpose" else col, x, "cpu", "broad tiles")
            if op == "quantize":
                assert compare(kernel, row, None, x, "cpu", "broad tiles")


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)"])
@pytest.mark.parametrize("size", [(128, 256), (33, 70)])
def test_transposes_are_written_to_given_memory(
    text: str, size: tuple[int, int], launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = lpq.quantizer(text)
    kernel = on_cuda("transpose", registry.format_of(type(quantizer)).name)
    assert kernel is not None
    assert kernel.bind is not None
    bind = registry.resolve(kernel.bind)
    monkeypatch.setattr(derived_operands, "_bound", lambda operand, device, kernels: bind(operand, device))
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
        with Poisoned():  # type: ignore[no-untyped-call]
            row, col, measured = lpq_fp8.cuda.bind(e)(x, x.data_ptr(), (amaxes if given else None,), None)
        assert [t.stride(0) % 4 for t in (row[1], col[1])] == [0, 0]
        got = (*row, *col, *measured)
        for i, (one, other) in enumerate(zip(got, expected[: len(got)], strict=True)):
            same(one, other, f"{size}, given {given}, measure {measure}, output {i}")


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


@pytest.mark.parametrize("backwards", [False, True])
def test_threads_wait_and_talk(backwards: bool, tmp_path: Path) -> None:
    told = kernel_of(tmp_path, "out[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 16);")
    assert run(told, backwards) == [i ^ 16 for i in range(64)]
    (tmp_path / "b").mkdir()
    waits = "shared[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = shared[63 - threadIdx.x];"
    assert run(kernel_of(tmp_path / "b", waits), backwards) == list(range(63, -1, -1))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_wait_that_is_missing_is_noticed(backwards: bool, tmp_path: Path) -> None:
    """Also where the threads of a warp have waited for each other."""
    body = "shared[threadIdx.x] = threadIdx.x; __syncwarp(); out[threadIdx.x] = shared[63 - threadIdx.x];"
    assert run(kernel_of(tmp_path, body), backwards) != list(range(63, -1, -1))


COPY = """
    __shared__ uint4 piece;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(&piece)), "l"(out));
    {wait}
    out[4 + threadIdx.x % 60] = piece.x;
"""


def test_a_copy_is_there_when_it_was_waited_for(tmp_path: Path) -> None:
    assert (
        run(kernel_of(tmp_path, COPY.format(wait='asm volatile("cp.async.wait_all;" ::: "memory");')), False)[4] == -1
    )
    (tmp_path / "b").mkdir()
    assert run(kernel_of(tmp_path / "b", COPY.format(wait="")), False)[4] == 0xA5A5A5A5 - (1 << 32)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("__stcs((uint4*)(out + 1), make_uint4(0, 0, 0, 0));", "not aligned"),
        ("__ldcs((const uint2*)(out + 1));", "not aligned"),
        ("extern __shared__ uint4 dynamic[]; dynamic[0] = make_uint4(1, 2, 3, 4);", "more shared memory is written"),
    ],
)
def test_what_a_gpu_refuses_is_told(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(kernel_of(tmp_path, body), False)


def test_what_nobody_wrote_is_noticed(tmp_path: Path) -> None:
    assert set(run(kernel_of(tmp_path, "out[threadIdx.x] = shared[threadIdx.x];"), False)) == {0xA5A5A5A5 - (1 << 32)}


def test_threads_that_wait_for_ever_are_noticed(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "if (threadIdx.x % 2) __syncthreads(); __syncwarp();")
    with pytest.raises(RuntimeError, match="threads wait for others for ever"):
        run(kernel, backwards=False)


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
    monkeypatch.setitem(TURNS, ..., itertools.repeat(backwards))
    quantizer = lpq.quantizer(text)
    kernel = on_cuda(op, registry.format_of(type(quantizer)).name)
    assert kernel is not None
    with pytest.raises(AssertionError, match=r"output \d: .* differ"):
        compare(kernel, quantizer.side("row"), quantizer.side("col"), normal(150, 200), "cpu")


def test_a_kernel_that_is_wrong_is_noticed(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(lambda text: text.replace("store_row(t, p.data, i, low, high)", "store_row(t, p.data, i, low, high ^ 1)"))
    assert_noticed("quantize", "mxfp8", False, monkeypatch)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("op", "text", "file", "which"),
    [
        ("measure", "fp8(scaling=block)", "blocks.cu", 0),
        *(("measure", text, "amaxes.cu", 1) for text in ("nvfp4", "nvfp4(rht=true)")),
        ("quantize", "fp8(scaling=block)", "vector.cu", 3),
        *(("quantize", text, "quantize.cu", which) for text in ("mxfp8", "nvfp4") for which in (0, 1)),
    ],
)
def test_a_wait_that_is_left_out_of_a_kernel_is_noticed(
    op: str, text: str, file: str, which: int, backwards: bool, changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = registry.format_of(type(lpq.quantizer(text))).name
    source, wait = (nvrtc_cache.csrc() / name / file).read_text(), "__syncthreads();"
    parts = source.split(wait)
    without = wait.join(parts[: which + 1]) + ";" + wait.join(parts[which + 1 :])
    assert len(without) == len(source) - len(wait) + 1
    changed(lambda text: without if text == source else text)
    assert_noticed(op, text, backwards, monkeypatch)
