"""The Triton kernels run by Triton's interpreter on a CPU: ``test_triton_interpreted.py`` starts pytest on this file.

The interpreter must be asked for before Triton is imported, so this needs a process of its own.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from quantizers import IN_KERNELS
from quick_interpreter import _quick_interpreter
from tile_sides import serves
from torch import Tensor

import lpq
from lpq import operations, registry
from lpq.core import Quantizer
from lpq.formats import elements
from lpq.formats.elements import E4M3, E5M2, decode_e2m1, decode_e8m0, decode_float8
from lpq.testing.comparing import compare_call

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402

from lpq.kernels.triton import numbers  # noqa: E402
from lpq.optim import QuantizedStates, adamw, adamw_triton  # noqa: E402

__all__ = ["_quick_interpreter"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of products that overflow

SEED = -12345678901
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = {"fp8": (35, 150), "mxfp8": (35, 50), "mxfp4": (35, 50), "nvfp4": (35, 50)}
"""Ragged in the format's blocks, and more than one tile."""


# ---------------------------------------------------------------------------------------------- casts


@triton.jit
def _casts(x, r, e4m3, e5m2, e2m1, random, exponent, bf16, N: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(x + at)
    tl.store(e4m3 + at, numbers.cast_float8(values, values, False))
    tl.store(e5m2 + at, numbers.cast_float8(values, values, True))
    tl.store(e2m1 + at, numbers.cast_e2m1(values).to(tl.uint8))
    tl.store(random + at, numbers.cast_e2m1_stochastic(values, tl.load(r + at)).to(tl.uint8))
    tl.store(exponent + at, numbers.cast_e8m0(tl.abs(values)).to(tl.uint8))
    tl.store(bf16 + at, numbers.narrow(values, tl.bfloat16))


@triton.jit
def _decodes(code, e4m3, e5m2, e2m1, e8m0, inverse):
    at = tl.arange(0, 256)
    codes = tl.load(code + at)
    tl.store(e4m3 + at, numbers.decode_float8(codes, False))
    tl.store(e5m2 + at, numbers.decode_float8(codes, True))
    tl.store(e2m1 + at, numbers.decode_e2m1(codes.to(tl.int32) & 15))
    tl.store(e8m0 + at, numbers.decode_e8m0(codes.to(tl.int32)))
    tl.store(inverse + at, numbers.inverse_e8m0(codes.to(tl.int32)))


@triton.jit
def _widen(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, numbers.widen(tl.load(x + at)))


def numbers_of_all_sizes() -> Tensor:
    """2^19 numbers: every bf16, what lies beside it, and the ties of every element type with what lies beside them."""
    every = torch.arange(1 << 16, dtype=torch.int32) << 16
    codes = torch.arange(256, dtype=torch.uint8)
    grids = [*(decode_float8(codes.view(e)) for e in (E4M3, E5M2)), decode_e2m1(codes % 16), decode_e8m0(codes)]
    ties = []
    for grid in grids:
        grid = grid[grid.isfinite()].double().unique()
        ties += [grid.float(), ((grid[1:] + grid[:-1]) / 2).float()]
    special = torch.cat(ties).view(torch.int32)
    bits = torch.cat([every, every + 1, every + 0x7FFF, every + 0x8000, every + 0x8001])
    bits = torch.cat([bits, special, special - 1, special + 1])
    draw = torch.Generator().manual_seed(0)
    rest = torch.randint(-(1 << 31), (1 << 31) - 1, ((1 << 19) - len(bits),), generator=draw)
    return torch.cat([bits, rest.int()]).view(torch.float32)


def expect_numbers(got: Tensor, wanted: Tensor, integers: torch.dtype = torch.int32) -> None:
    """The same bits, but that any NaN is as good as another."""
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0).view(integers), wanted.nan_to_num(7.0).view(integers))


def test_casts_equal_the_reference_for_numbers_of_all_sizes() -> None:
    x = numbers_of_all_sizes()
    r = torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes = [torch.empty(x.shape, dtype=torch.uint8) for _ in range(5)]
    bf16 = torch.empty(x.shape, dtype=torch.bfloat16)
    _casts[(1,)](x, r, *codes, bf16, N=len(x))
    expected = [
        elements.cast_float8(x, E4M3).view(torch.uint8),
        elements.cast_float8(x, E5M2).view(torch.uint8),
        elements.cast_e2m1(x),
        elements.cast_e2m1_stochastic(x, r),
        elements.cast_e8m0(x.abs()),
    ]
    for name, got, wanted in zip(("e4m3", "e5m2", "e2m1", "stochastic", "e8m0"), codes, expected, strict=True):
        wrong = got != wanted
        assert not wrong.any(), (name, x[wrong][:4], got[wrong][:4], wanted[wrong][:4])
    expect_numbers(bf16, x.bfloat16(), torch.int16)


def test_decoded_codes_equal_the_reference() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = [torch.empty(256) for _ in range(5)]
    _decodes[(1,)](codes, *got)
    expected = [
        decode_float8(codes.view(E4M3)), decode_float8(codes.view(E5M2)), decode_e2m1(codes % 16),
        decode_e8m0(codes), elements.inverse_e8m0(codes),
    ]  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        expect_numbers(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_widened_exactly(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    out = torch.empty(1 << 16)
    _widen[(1,)](x, out, N=1 << 16)
    expect_numbers(out, x.float())


# ---------------------------------------------------------------------------------------------- formats

QUANTIZERS = [
    *IN_KERNELS,
    "fp8(scaling=block, block=128x128, pow2=false)",
    "hybrid(row=fp8, col=fp8(scaling=block, dtype=e5m2))",
    "hybrid(row=nvfp4(block=16x16), col=nvfp4(rht=true))",
]


def compare(op: str, quantizer: Quantizer, arguments: tuple[Any, ...], what: object) -> None:
    """Call the Triton kernel of a quantizer's format with these arguments, and the reference."""
    found = [k for k in registry.kernels(op, (name_of(quantizer),)) if k.backend == "triton"]
    kernel = next(k for k in found if len(found) == 1 or serves(k, quantizer))
    compare_call(kernel, arguments, arguments, f"{quantizer}, {what}")


def quantize(
    x: Tensor, stats: list[Tensor | None], row: Quantizer | None, col: Quantizer | None, offset: int, measure: bool,
    what: str = "",
) -> None:  # fmt: skip
    arguments = (x, stats, row, col, torch.tensor(SEED), offset, measure)
    compare("quantize", row or col, arguments, f"beside {col}, {x.dtype} {list(x.shape)} {what}")


def name_of(quantizer: Quantizer) -> str:
    return registry.format_of(type(quantizer.side("row"))).name


def values(quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers from the smallest to the largest, some equal and some zero, in rows and columns of very different size;
    the same with a NaN, and with an infinity."""
    shape = SHAPES[name_of(quantizer)]
    g = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    low, high = torch.tensor([info.smallest_normal * info.eps, info.max], dtype=torch.float64).log2()
    size = low + torch.rand(shape, generator=g, dtype=torch.float64) * (high - low)
    size[: shape[0] // 2] = torch.randint(-6, 6, (shape[0] // 2, 1), generator=g) + size[: shape[0] // 2] / 40
    size[:, shape[1] // 2 :].clamp_(max=3)
    x = torch.exp2(size) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)
    x = torch.where(torch.rand(shape, generator=g) < 0.05, -0.0, x).clamp(-info.max, info.max).to(dtype)
    x[1, :40], x[:, 2] = 0.0, -0.0
    nan, inf = x.clone(), x.clone()
    nan[3, -1] = -torch.nan
    inf[0, -2] = -torch.inf
    moderate = torch.randn(shape, generator=g).mul(8).round().div(4).to(dtype)
    return {"all sizes": x, "nan": nan, "infinity": inf, "grid": moderate}


def one_tile(x: Tensor) -> Tensor:
    """A part with the NaN or the infinity and with zeros, of which a kernel makes one tile."""
    return x[:20, -24:]


@pytest.mark.parametrize(("first", "text"), list(enumerate(QUANTIZERS)), ids=lambda value: str(value))
def test_quantize_equals_the_reference(first: int, text: str) -> None:
    """Both operands at once, of numbers of all kinds; their statistics measured on the way, and not.

    A NaN and an infinity take turns among quantizers. So do dtypes, and each quantizer begins with another one: kernels
    widen what they read, every number exactly, before they do anything. The first matrix alone has several tiles.
    """
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    for i, name in enumerate(("all sizes", ("nan", "infinity")[first % 2], "grid")):
        x = values(quantizer, DTYPES[(first + i) % len(DTYPES)])[name]
        quantize(x if i == 0 else one_tile(x), [], row, col, 16 * i, i % 2 == 0, name)


@pytest.mark.parametrize(("first", "text"), list(enumerate(QUANTIZERS))[::2], ids=lambda value: str(value))
def test_one_operand_and_given_statistics(first: int, text: str) -> None:
    """Statistics that are not those of the tensor, as of one that is a part or comes later; some of them missing.
    Either operand is alone in turn."""
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    x = values(quantizer, torch.bfloat16)["all sizes"]
    for one, other in (((row, None), (None, col))[first // 2 % 2], (row, col)):
        others: list[Tensor | None] = [*operations.measure_reference(x * 0.5, one, other)]
        quantize(x, others, one, other, 32, one is None, "given")
    quantize(x, [*others[:-1], None], row, col, 0, True, "in part")


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (200, 1), (0, 64), (64, 0), (130, 17)], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "fp8(scaling=row)",
        "fp8(scaling=block)",
        "mxfp8",
        "mxfp4(scale=even, rht=true, stochastic=true)",
        "nvfp4(rht=true, stochastic=true)",
    ],
)
def test_shapes(text: str, shape: tuple[int, int]) -> None:
    quantizer = lpq.quantizer(text)
    g = torch.Generator().manual_seed(0)
    quantize(torch.randn(shape, generator=g), [], quantizer.side("row"), quantizer.side("col"), 0, True)


@pytest.mark.parametrize("direction", ["row", "col"])
def test_eden(direction: str) -> None:
    """Either operand alone, in ragged groups of 128 and whole ones, also of a shard."""
    quantizer = lpq.quantizer("nvfp4(stochastic=eden)")
    sides = (quantizer, None) if direction == "row" else (None, quantizer)
    lines = torch.randn((36, 150), generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 150)
    lines[3, 140], lines[20, 5] = torch.inf, torch.nan
    x, empty = (lines, (0, 150)) if direction == "row" else (lines.t().contiguous(), (150, 0))
    for matrix, stats, offset in (
        (x, [], 0), (x[:128, 20:].bfloat16(), [torch.tensor(0.25)], 256), (x[:5, :128].clamp(max=1).half(), [], 5),
        (torch.zeros(3, 16), [], 0), (torch.zeros(empty), [], 0), (x, [torch.tensor(0.25)], 0),
    ):  # fmt: skip
        quantize(matrix, stats, *sides, offset, True)
    compare("measure", quantizer, (x, *sides), "of all sizes")
    for matrix, dtype in zip((lines, lines.nan_to_num(1, 1)[:, :128]), DTYPES, strict=False):
        made = operations.quantize_reference(matrix, [], quantizer, None, torch.tensor(SEED), 0, False)
        operand = quantizer.storage.from_tensors(made, quantizer, (36, matrix.shape[1]), torch.float32)
        compare("decode", quantizer, (operand, dtype), "of all sizes")


def test_random_bits_in_groups_that_are_cut() -> None:
    quantizer = lpq.quantizer("nvfp4(stochastic=true)")
    x = values(quantizer, torch.float32)["grid"]
    quantize(x, [], quantizer.side("row"), quantizer.side("col"), 5, False)
    quantize(x, [], quantizer.side("row"), None, 5, False)


@pytest.mark.parametrize("text", [text for text in QUANTIZERS if "stochastic" not in text])
def test_other_operations_equal_the_reference(text: str) -> None:
    """Measuring, decoding and transposing, of numbers of all kinds."""
    quantizer = lpq.quantizer(text)
    of_kinds = values(quantizer, torch.float32)
    row, col = quantizer.side("row"), quantizer.side("col")
    for first, name in ((row, "nan"), (None, "all sizes")):
        compare("measure", first or col, (of_kinds[name], first, col), name)
    for (name, whole), dtype in zip(of_kinds.items(), itertools.cycle(DTYPES)):
        x = whole if name == "all sizes" else one_tile(whole)
        for side, matrix in ((row, x), (col, x.t())):
            made = operations.quantize_reference(matrix, [], side, None, torch.tensor(SEED), 0, False)
            operand = side.storage.from_tensors(made, side, (matrix.shape[0], matrix.shape[1]), x.dtype)
            compare("decode", side, (operand, dtype), name)
            if side.transposable:
                compare("transpose", side, (operand,), name)


# ---------------------------------------------------------------------------------------------- would it be noticed?


def test_a_wrong_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own cast to an 8-bit float rounds 1.97 to 1 in place of 2."""
    module = importlib.import_module("lpq_mxfp8.triton")
    quantizer = lpq.quantizer("mxfp8")
    x = torch.tensor([[256.0, 1.97]])
    quantize(x, [], quantizer, None, 0, False)

    @triton.jit
    def native(product, x, E5M2: tl.constexpr):
        return product.to(tl.float8e4nv).to(tl.uint8, bitcast=True)

    monkeypatch.setattr(module, "cast_float8", native)
    with pytest.raises(AssertionError, match=r"output 0: .* differ"):
        quantize(x, [], quantizer, None, 0, False)


def test_an_element_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lpq_mxfp8.triton")
    quantizer = lpq.quantizer("mxfp8")
    x = torch.ones(70, 40)
    monkeypatch.setattr(module, "programs", lambda *_: 1)
    with pytest.raises(AssertionError, match=r"output 0: .* differ"):
        quantize(x, [], quantizer, None, 0, False)


# ---------------------------------------------------------------------------------------------- states of optimizers


STORED = {"mxfp8": torch.bfloat16, "fp8(scaling=block, pow2=false, dtype=e5m2)": torch.float32}


@pytest.mark.parametrize(("first", "dtype"), STORED.items())
def test_a_step_of_adamw(first: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, and the codes and scales of their moments, after steps with gradients of all sizes and NaN. One
    launch steps all that are aligned, and one the others; one of its own has a gradient that is transposed."""
    formats = {"exp_avg": first, "exp_avg_sq": "fp8(scaling=block, pow2=false)"}
    random = torch.Generator().manual_seed(0)
    shapes = [(35, 150), (16, 16), (33, 272), (2, 3, 40), (1, 7), (48, 32)]
    weights = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    group = {"lr": 1e-2, "weight_decay": 0.1, "maximize": first == "mxfp8"}
    optimizer, reference = (
        QuantizedStates(torch.optim.AdamW(params, **group), least=1, **formats) for params in (ours, theirs)
    )
    m, root = (form.quantizer for form in optimizer.forms.values())
    kernels = [importlib.import_module(f"lpq_{registry.format_of(type(q)).name}.triton") for q in (m, root)]
    tiles = adamw.Tiles(
        kernels[0].stored_tile(m), kernels[1].stored_tile(root), optimizer.forms["exp_avg_sq"].least.share
    )
    launched: list[int] = []
    launch = adamw_triton.launch
    monkeypatch.setattr(
        adamw_triton, "launch", lambda *given, **kinds: launched.append(given[1]) or launch(*given, **kinds)
    )
    for step in range(4):
        gradients = []
        for shape in shapes:
            sizes = torch.rand(shape, generator=random).mul(-60).exp2() * (torch.rand(shape, generator=random) > 0.1)
            gradients.append((torch.randn(shape, generator=random) * sizes).to(dtype))
        gradients[-1] = gradients[-1].t().contiguous().t()
        if step == 3:
            gradients[0][0, 0] = torch.nan
        for params, one, functions in ((ours, optimizer, tiles), (theirs, reference, None)):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(adamw, "tiles", lambda *_, found=functions: found)
                one.step()
        for p, q in zip(ours, theirs, strict=True):
            mine, its = optimizer.state[p], reference.state[q]
            assert torch.equal(p.nan_to_num(7), q.nan_to_num(7)), step
            assert mine["step"] == its["step"] == step + 1
            for key in ("exp_avg", "exp_avg_sq_root"):
                for a, b in zip(mine[key].buffers, its[key].buffers, strict=True):
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (step, key)
    assert bool((optimizer.state[ours[0]]["exp_avg"].dequantize()[1:] != 0).any())
    assert len(launched) == 4 * 3
