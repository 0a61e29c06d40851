"""The ground of products through bf16: elements times block scales are exact in it, for every code and every scale."""

from __future__ import annotations

from collections.abc import Iterator

import lpq_fp8.gemm as scaled
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lpq
from lpq import operations, registry
from lpq.cli.kernels import served
from lpq.core import Storage
from lpq.emulation import bf16_gemm as composed
from lpq.kernels import choose, cublaslt, products
from lpq.operations.binding import cached_product
from lpq.operations.exact_form import Exact
from lpq.registry import FormatSpec, KernelSpec, hookimpl
from lpq.testing.expect import relative_error

GPU = torch.device("cuda", 0)
CODES = torch.arange(256, dtype=torch.uint8)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
BF16_LEAST = 2.0**-133
"""The least subnormal number of bf16."""


def exact(operand: Storage) -> Exact:
    """The exact form by the format's own function, which is plain PyTorch."""
    name = registry.format_of(type(operand.quantizer)).name
    kernels = [k for k in registry.kernels("exact", (name,)) if k.backend == "torch"]
    found: Exact = registry.resolve(kernels[0].impl)(operand)
    assert found.matrix.dtype == torch.bfloat16
    return found


def wrap(text: str, *buffers: Tensor, shape: tuple[int, int]) -> Storage:
    quantizer = lpq.quantizer(text).side("col")
    return quantizer.storage.from_tensors(buffers, quantizer, shape, torch.bfloat16)


def same_numbers(got: Tensor, expected: Tensor) -> bool:
    """Whether they are equal, a NaN to a NaN."""
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


# ---------------------------------------------------------------------------------------------- nvfp4


def every_nvfp4_operand(text: str, amax: float) -> tuple[Storage, Tensor]:
    """A row for each scale, with every code in it, and what elements times scales are."""
    data = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(256, -1)
    scale = CODES.view(torch.float8_e4m3fn)[:, None]
    operand = wrap(text, data.contiguous(), scale, torch.tensor(amax), shape=(256, 16))
    return operand, torch.cat([E2M1, -E2M1]) * scale.double()


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4(rht=true)"])
@pytest.mark.parametrize("amax", [0.7, 1e-38, 3e38])
def test_every_e2m1_times_every_e4m3_scale_is_exact(text: str, amax: float) -> None:
    operand, expected = every_nvfp4_operand(text, amax)
    found = exact(operand)
    assert same_numbers(found.matrix.double(), expected * 2.0**-11)
    assert found.factor is operand.amax
    assert found.constant == 2048 / 2688


def test_with_the_amax_in_it_few_of_them_would_be() -> None:
    """Negative control: this is what the factor is for."""
    operand, _ = every_nvfp4_operand("nvfp4", 0.7)
    decoded = operand.decode().nan_to_num()
    assert (decoded.bfloat16().float() != decoded).float().mean() > 0.5


def test_square_blocks_are_exact_too() -> None:
    operand = lpq.quantizer("nvfp4(block=16x16)").quantize(torch.randn(40, 50), col=False).row
    assert operand is not None
    found = exact(operand)
    assert relative_error(found.matrix.double() * operand.amax.double() * found.constant, operand.decode()) < 2e-7


def test_a_rotation_that_mixed_padding_in_leaves_a_rest() -> None:
    quantizer = lpq.quantizer("nvfp4(rht=true)")
    for rows in (48, 50, 17, 13):
        operand = quantizer.quantize(torch.randn(rows, 32), row=False).col
        assert operand is not None
        kernel = registry.kernels("exact", ("nvfp4",))[-1]
        found = registry.resolve(kernel.impl)(operand)
        if rows < 16:
            assert found is None
            continue
        assert found.matrix.shape == (32, rows // 16 * 16)
        made, whole = found.matrix.double() * operand.amax.double() * found.constant, found.matrix.shape[1]
        assert relative_error(made, operand.decode_rotated()[:, :whole]) < 2e-7
        assert (found.rest is None) == (rows % 16 == 0)
        if found.rest is not None:
            assert torch.equal(found.rest, operand.decode()[:, whole:].float())


@pytest.mark.parametrize("rows", [50, 17, 48, 13])
@pytest.mark.parametrize("other", ["nvfp4(rht=true)", "mxfp4(rht=true)"])
def test_a_product_of_rotated_operands_of_any_size(hopper: None, rows: int, other: str) -> None:
    """Blocks of 16 and of 32 cut the columns that a rotation mixed padding into at other places."""
    quantizers = lpq.quantizer("nvfp4(rht=true)"), lpq.quantizer(other)
    generator = torch.Generator().manual_seed(rows)
    left, right = (
        quantizer.quantize(torch.randn(rows, cols, generator=generator), row=False).col
        for quantizer, cols in zip(quantizers, (40, 24), strict=True)
    )
    assert left is not None and right is not None  # noqa: PT018
    bias = torch.randn(24)
    exactly = left.decode().double() @ right.decode().double().t()
    for added in (None, bias):
        got = composed.gemm(left, right, added, torch.float32)
        assert relative_error(got, exactly if added is None else exactly + added) < 2e-6


# ---------------------------------------------------------------------------------------------- mxfp8


@pytest.mark.parametrize(("element", "least"), [("e4m3", 2.0**-9), ("e5m2", 2.0**-16)])
def test_every_8_bit_float_times_every_power_of_two_is_exact_down_to_subnormal_numbers(
    element: str, least: float
) -> None:
    """A row for each exponent, with every code in it. ``least`` is the least element."""
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    data = CODES.expand(256, -1).contiguous().view(dtype)
    exponents = CODES[:, None].expand(-1, 8).contiguous()
    got = exact(wrap(f"mxfp8(dtype={element})", data, exponents, shape=(256, 256))).matrix.double()
    power = torch.exp2(CODES.double() - 127)[:, None]
    power[255] = torch.nan
    expected = data.double() * power
    over = expected.abs() >= 2.0**128  # as in fp32
    assert bool((got[over] == expected[over].sign() * torch.inf).all())
    expected = torch.where(over, got, expected)
    fine = (least * power >= BF16_LEAST) | power.isnan()
    assert same_numbers(torch.where(fine, got, 0), torch.where(fine, expected, 0))
    first = int(fine.flatten().int().argmax())
    assert first == {"e4m3": 3, "e5m2": 10}[element]
    # Below: rounded to the nearest subnormal number, and not all of them exact.
    assert bool(((got - expected).abs()[:first].nan_to_num() <= BF16_LEAST / 2).all())
    assert not same_numbers(got[:first], expected[:first])


# ---------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_every_8_bit_float_is_exact_and_its_scale_a_factor(dtype: str) -> None:
    element = torch.float8_e4m3fn if dtype == "e4m3" else torch.float8_e5m2
    data = CODES.expand(3, -1).contiguous().view(element)
    for scaling, scale in (("current", torch.tensor(0.37)), ("row", torch.tensor([[0.37], [1e-30], [3e30]]))):
        operand = wrap(f"fp8(scaling={scaling}, dtype={dtype})", data, scale, shape=(3, 256))
        found = exact(operand)
        assert same_numbers(found.matrix.double(), data.double())
        assert found.factor is not None
        assert same_numbers(found.matrix.float() * found.factor, operand.decode())


def test_every_8_bit_float_times_the_power_of_two_of_its_block_is_exact() -> None:
    data = CODES.expand(200, -1).contiguous().view(torch.float8_e4m3fn)
    scale = torch.exp2(torch.arange(-110.0, 90.0))[:, None].expand(-1, 2).contiguous()
    found = exact(wrap("fp8(scaling=block)", data, scale, shape=(200, 256)))
    assert same_numbers(found.matrix.double(), data.double() * scale[:, :1].double())
    assert found.factor is None


# ---------------------------------------------------------------------------------------------- pairs


class Third:
    """A third party's format: mxfp8's classes under another name, and one line that says it is exact."""

    @staticmethod
    @hookimpl
    def lpq_register_formats() -> FormatSpec:
        return FormatSpec(
            name="third",
            summary="a format of a third party",
            quantizer="test_products:ThirdQuantizer",
            storage="lpq_mxfp8.storage:MXFP8Storage",
            effective_bits=8.25,
            kernels=(KernelSpec(op="exact", impl="lpq.emulation.bf16_gemm:decoded", backend="torch", min_sm=80),),
        )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table's answers on a GPU of compute capability 9.0, and sums as a GPU makes them."""
    yield from _gpu(monkeypatch, (9, 0))


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _gpu(monkeypatch, (8, 9))


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _gpu(monkeypatch, (10, 0))


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Iterator[None]:
    monkeypatch.setenv("LPQ_KERNELS", "torch,reference")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(products, "sums", lambda left, right: left.float() @ right.float().t())
    monkeypatch.setattr(composed, "choose", lambda op, operands, device: choose(op, operands, GPU))
    registry.refresh()
    yield
    registry.refresh()


FORMATS = (
    "fp8", "fp8(dtype=e5m2)", "fp8(scaling=row)", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "mxfp8",
    "nvfp4", "nvfp4(block=16x16)", "identity(dtype=bfloat16)",
)  # fmt: skip


def operands(a: str, b: str) -> tuple[Storage, Storage]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 112, generator=generator) for rows in (40, 24))
    left, right = lpq.quantizer(a).quantize(x, col=False).row, lpq.quantizer(b).quantize(w, col=False).row
    assert left is not None
    assert right is not None
    return left, right


def name_of(text: str) -> str:
    return text.partition("(")[0]


@pytest.mark.parametrize("a", FORMATS)
def test_a_mixed_pair_is_multiplied_through_bf16(hopper: None, a: str) -> None:
    for b in (b for b in FORMATS if name_of(b) != name_of(a)):
        choice = choose("gemm", (lpq.quantizer(a).text, lpq.quantizer(b).text), GPU)
        assert choice.impl is composed.gemm, (b, choice.rejected)
        left, right = operands(a, b)
        bias = torch.randn(24)
        got = composed.gemm(left, right, bias, torch.float32)
        exactly = left.decode().double() @ right.decode().double().t() + bias
        assert relative_error(got, exactly) < 1e-6, b
        rounded = left.decode().bfloat16().double() @ right.decode().bfloat16().double().t() + bias
        inexact = [q for q in (a, b) if q.startswith("nvfp4") or q in ("fp8", "fp8(dtype=e5m2)", "fp8(scaling=row)")]
        assert (relative_error(rounded, exactly) > 1e-4) == bool(inexact), b  # what the factors are for


@pytest.mark.parametrize(
    ("gpu", "own"),
    [("ada", {"tensor", "row"}), ("hopper", {"tensor", "row", "block"}), ("blackwell", {"tensor", "row"})],
)
def test_what_the_scaled_matmul_multiplies_of_fp8(gpu: str, own: set[str], request: pytest.FixtureRequest) -> None:
    """Blocks on Hopper alone, as cuBLAS does; elsewhere they go through bf16, and the reason is told."""
    request.getfixturevalue(gpu)
    for kind, a, b in (
        ("tensor", "fp8(dtype=e5m2)", "fp8"),
        ("row", "fp8(scaling=row)", "fp8(scaling=row)"),
        ("block", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)"),
        ("block", "fp8(scaling=block)", "fp8(scaling=block)"),
    ):
        choice = choose("gemm", (lpq.quantizer(a).text, lpq.quantizer(b).text), GPU)
        wanted = scaled.gemm_of_blocks if kind == "block" else scaled.gemm
        assert choice.impl is (wanted if kind in own else composed.gemm), choice.rejected
        if kind not in own:
            reasons = {kernel.impl: reason for kernel, reason in choice.rejected}
            assert "compute capability" in reasons["lpq_fp8.gemm:gemm_of_blocks"]


@pytest.mark.parametrize(
    ("gpu", "dtype", "b", "own"),
    [
        ("hopper", torch.float32, "fp8(scaling=row)", True),
        ("hopper", torch.bfloat16, "fp8(scaling=row, dtype=e5m2)", True),
        *(
            (gpu, *case)
            for gpu in ("ada", "blackwell")
            for case in (
                (torch.bfloat16, "fp8(scaling=row)", True),
                (torch.float32, "fp8(scaling=row)", False),
                (torch.bfloat16, "fp8(scaling=row, dtype=e5m2)", False),
            )
        ),
    ],
)
def test_what_torch_refuses_of_rows_goes_through_bf16(
    gpu: str, dtype: torch.dtype, b: str, own: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(gpu)
    asked = []
    monkeypatch.setattr(cublaslt, "library", lambda: None)  # of torch for CUDA, whose products need a GPU
    monkeypatch.setattr(scaled, "scaled_matmul", lambda *arguments: asked.append(arguments))
    x, w = torch.randn(32, 48), torch.randn(16, 48)
    left, right = lpq.quantizer("fp8(scaling=row)").quantize(x).row, lpq.quantizer(b).quantize(w).row
    assert left is not None
    assert right is not None
    made = scaled.gemm(left, right, None, dtype, True)
    assert bool(asked) == own
    if not own:
        expected = operations.gemm_reference(left, right, None, torch.float32)
        assert made.dtype == dtype
        assert relative_error(made, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(
    ("rows", "inner", "block", "own"),
    [
        (16, 512, "128x128", True),
        (48, 1024, "128x128", True),
        (16, 640, "128x128", True),  # with scales that are filled up, to 8 for each line
        (16, 144, "128x128", True),  # the last block is not whole
        (20, 512, "128x128", True),
        (18, 512, "128x128", False),
        (16, 640, "1x128", True),
        (4, 128, "1x128", True),
        (16, 192, "1x128", True),
        (2, 128, "1x128", False),
        (16, 72, "1x128", False),
    ],
)
def test_which_sizes_the_scaled_matmul_has_for_blocks(
    rows: int, inner: int, block: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page of the format says."""
    called: list[Tensor | None] = []
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    monkeypatch.setattr(scaled, "scaled_mm", lambda *arguments, **how: called.append(arguments[4]))
    monkeypatch.setattr(scaled, "bind_in_bf16", lambda product: lambda *arguments: called.append(None))
    left = lpq.quantizer("fp8(scaling=block)").quantize(torch.randn(rows, inner), col=False).row
    right = lpq.quantizer(f"fp8(scaling=block, block={block})").quantize(torch.randn(256, inner), col=False).row
    assert left is not None
    assert right is not None
    cached_product(scaled.bind_blocks)(left, right, None, torch.bfloat16, False)
    (scales,) = called
    assert (scales is not None) == own
    if scales is not None:
        blocks = -(-inner // 128)
        if block == "1x128":
            assert torch.equal(scales, right.scale)
            assert scales.stride(0) == 1
        else:
            filled = -(-blocks // 4) * 4
            assert scales.shape == (filled, 2)
            assert scales.stride() == (1, filled)
            assert torch.equal(scales[:blocks], right.scale.t())


def test_a_format_of_a_third_party_needs_one_line(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from lpq_mxfp8.quantizer import MXFP8Quantizer

    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "test_products", module)
    monkeypatch.setattr(module, "ThirdQuantizer", type("ThirdQuantizer", (MXFP8Quantizer,), {}), raising=False)
    registry.register(Third, name="third")
    for a, b in (("third", "nvfp4"), ("fp8", "third"), ("third", "third")):
        choice = choose("gemm", (a, b), GPU)
        assert choice.impl is composed.gemm, choice.rejected
        left, right = operands(a, b)
        got = composed.gemm(left, right, None, torch.float32)
        assert relative_error(got, operations.gemm_reference(left, right, None, torch.float32)) < 1e-6


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("nvfp4(rht=true)", "nvfp4", "different bases"),
        ("fp8(scaling=block, pow2=false)", "mxfp8", "no powers of two"),
        ("identity(dtype=float32)", "mxfp8", "float32 is not exact in bf16"),
        ("mxfp8", "identity(dtype=float16)", "float16 is not exact in bf16"),
    ],
)
def test_what_has_no_exact_form_is_left_to_the_reference(hopper: None, a: str, b: str, reason: str) -> None:
    choice = choose("gemm", (lpq.quantizer(a).text, lpq.quantizer(b).text), GPU)
    assert choice.backend == "reference"
    assert reason in choice.rejected[-1][1]


def test_a_matrix_that_turns_out_to_be_in_fp32_is_multiplied_by_the_reference(hopper: None) -> None:
    left, right = operands("identity", "mxfp8")
    got = composed.gemm(left, right, None, torch.float32)
    assert torch.equal(got, operations.gemm_reference(left, right, None, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factors_of_both_sides_and_a_bias(hopper: None, dtype: torch.dtype) -> None:
    """Scales of rows and of the whole, and one rounding, at the end: until then all of this is exact in fp32."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*size: int, step: float) -> Tensor:
        return torch.randint(-31, 32, size, generator=generator) * step

    left, right = numbers(6, 32, step=1).bfloat16(), numbers(5, 32, step=1).bfloat16()
    whole, rows, cols = torch.tensor(3 / 8), numbers(6, 1, step=1 / 16), numbers(5, 1, step=1 / 16)
    bias = numbers(5, step=1 / 4)
    for of_left, of_right in ((whole, None), (None, whole), (rows, None), (None, cols), (rows, whole), (rows, cols)):
        for added in (None, bias):
            got = products.scaled_product(left, right, of_left, of_right, 0.5, added, dtype)
            wanted = left.double() @ right.double().t() * 0.5
            wanted = wanted * (of_left if of_left is not None else 1)
            wanted = wanted * (of_right.t() if of_right is not None else 1)
            wanted = wanted + (added if added is not None else 0)
            assert got.dtype == dtype
            assert torch.equal(got, wanted.to(dtype))
            rows_of_more = torch.full((18, 5), torch.nan, dtype=dtype)
            products.scaled_product(left, right, of_left, of_right, 0.5, added, dtype, rows_of_more[6:12])
            assert torch.equal(rows_of_more[6:12], got)
            assert rows_of_more.isnan().sum() == 2 * got.numel()


def test_empty_operands(hopper: None) -> None:
    for rows, inner, cols in ((0, 16, 3), (3, 0, 2), (3, 16, 0)):
        left = lpq.quantizer("mxfp8").quantize(torch.ones(rows, inner), col=False).row
        right = lpq.quantizer("nvfp4").quantize(torch.ones(cols, inner), col=False).row
        assert left is not None
        assert right is not None
        got = composed.gemm(left, right, torch.ones(cols), torch.bfloat16)
        assert torch.equal(got, torch.ones(rows, cols, dtype=torch.bfloat16))


# ---------------------------------------------------------------------------------------------- Blackwell


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("mxfp8", "mxfp8(dtype=e5m2)"),
        ("nvfp4", "nvfp4(block=16x16)"),
        ("nvfp4(rht=true)", "nvfp4(rht=true, stochastic=true)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_native_products_are_called_as_torch_wants_them(a: str, b: str, dtype: torch.dtype, added: bool) -> None:
    """By torch's own rules for sizes, strides and dtypes. What it gives was never seen."""
    from lpq_mxfp8 import gemm as mxfp8
    from lpq_nvfp4 import gemm as nvfp4

    native = mxfp8.native if a.startswith("mxfp8") else nvfp4.native
    first, second = lpq.quantizer(a).side("col"), lpq.quantizer(b).side("col")
    with FakeTensorMode():
        left = first.storage.empty(first, (200, 256), torch.bfloat16, GPU)
        right = second.storage.empty(second, (48, 256), torch.bfloat16, GPU)
        bias = torch.zeros(48, device=GPU) if added else None
        got = native(left, right, bias, dtype, False)
    assert (got.shape, got.dtype) == ((200, 48), dtype)


def test_the_scale_of_a_square_block_is_that_of_each_of_its_rows() -> None:
    from lpq_nvfp4.gemm import _scales

    operand = lpq.quantizer("nvfp4(block=16x16)").quantize(torch.randn(200, 160), col=False).row
    assert operand is not None
    scale = operand.scale.view(torch.uint8)
    got = _scales(operand).view(torch.uint8)
    for row in range(200):
        for col in range(10):
            at = (row // 128 * 3 + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
            assert got[at] == scale[row // 16, col]


def test_they_are_said_to_be_untried(blackwell: None) -> None:
    for text in ("mxfp8", "nvfp4"):
        quantizer = lpq.quantizer(text)
        found = served("gemm", (quantizer, quantizer), GPU)
        assert found.impl == f"lpq_{text}.gemm:native"
        assert "never run on hardware" in found.note


def test_what_other_sizes_go_by_is_said(hopper: None) -> None:
    for quantizer in map(lpq.quantizer, ("fp8", "fp8(scaling=block)")):
        assert "other sizes are multiplied in bf16" in served("gemm", (quantizer, quantizer), GPU).note


def test_elsewhere_too(hopper: None) -> None:
    quantizer = lpq.quantizer("nvfp4")
    found = served("gemm", (quantizer, quantizer), GPU)
    assert (found.impl, found.note) == ("lpq.emulation.bf16_gemm:gemm", "")
    reasons = {rejected.impl: rejected.words for rejected in found.why_not}
    assert "needs compute capability 10.0" in reasons["torch lpq_nvfp4.gemm:native"]
    assert "never run on hardware" in reasons["torch lpq_nvfp4.gemm:native"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
def test_a_dtype_that_holds_no_product_is_refused(dtype: torch.dtype) -> None:
    a = lpq.quantizer("mxfp8").quantize(torch.randn(32, 64)).row
    with pytest.raises(TypeError, match=rf"gemm: dtype={dtype} cannot hold a product"):
        lpq.gemm(a, a, dtype=dtype)
