"""NVFP4: its bytes against the golden file and an independent implementation, its laws and its limits."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from lpq_nvfp4 import cuda, reference
from lpq_nvfp4.cuda import bind_operand
from nasty import DTYPES, GOLDEN, normal, unsigned_zeros, values
from support.comparing import equal_operands
from torch import Tensor

import lpq
from lpq.core import RandomBits, Storage, gemm, transpose
from lpq.formats.elements import unpack_nibbles
from lpq.formats.rotation import HADAMARD
from lpq.operations.binding import Encoding
from lpq.operations.fused_pair import Job
from lpq.registry.errors import OptionError

BLOCKS = {"1x16": (1, 16), "16x16": (16, 16)}
OPTIONS = [
    f"block={block}, rht={rht}, stochastic={stochastic}"
    for block in BLOCKS
    for rht in ("false", "true")
    for stochastic in ("false", "true", "unbiased")
]
every_block = pytest.mark.parametrize("block", BLOCKS)
every_option = pytest.mark.parametrize("options", OPTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def quantizer(options: str):
    return lpq.quantizer(f"nvfp4({options})")


# ------------------------------------------------------------------------------ the definition

ENCODINGS = {
    "nvfp4_1x16_row": ("nvfp4", "row"),
    "nvfp4_1x16_col": ("nvfp4", "col"),
    "nvfp4_16x16_row": ("nvfp4(block=16x16)", "row"),
    "nvfp4_16x16_col": ("nvfp4(block=16x16)", "col"),
    "nvfp4_1x16_rht_col": ("nvfp4(rht=true)", "col"),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_golden_bytes(golden, name: str, encoding: str) -> None:
    text, side = ENCODINGS[encoding]
    buffers = getattr(lpq.quantizer(text).quantize(golden.inputs[name]), side).buffers()
    expected = golden.buffers(name, encoding)
    assert list(buffers) == list(expected) == ["data", "scale", "amax"]
    assert torch.equal(unsigned_zeros(buffers["data"]), unsigned_zeros(expected["data"]))
    repeated = expected["scale"] if "16x16" not in text else expected["scale"][::16]
    assert torch.equal(expected["scale"], repeated.repeat_interleave(len(expected["scale"]) // len(repeated), 0))
    assert torch.equal(buffers["scale"].view(torch.uint8), repeated)
    assert torch.equal(buffers["amax"].view(torch.int32), expected["amax"].view(torch.int32))


def test_the_golden_file_has_nothing_else_of_this_format(golden) -> None:
    assert {key.split("/")[1] for key in golden if "/nvfp4" in key} == set(ENCODINGS)


def expect(operand: Storage, x: Tensor, options: str, random: Tensor | None) -> None:
    """Hold an operand of the matrix ``x`` against the independent implementation."""
    q = quantizer(options)
    made = oracle.encode(
        x.float().numpy(),
        BLOCKS[q.block],
        rht=operand.quantizer.rht,
        random=None if random is None else random.numpy(),
        roomy=q.unbiased,
    )
    codes = unpack_nibbles(operand.data).numpy()
    cols = made.codes.shape[1]
    assert np.array_equal(codes[:, :cols], made.codes)
    assert not codes[:, cols:].any(), "what pads the columns must be 0"
    assert np.array_equal(operand.scale.view(torch.uint8).numpy(), made.scales)
    assert np.array_equal(operand.amax.numpy(), made.amax, equal_nan=True)
    decoded = reference.decode(operand.data, operand.scale, operand.amax, BLOCKS[q.block]).numpy()
    assert np.array_equal(decoded[:, :cols], made.decoded, equal_nan=True)


@every_option
@every_dtype
def test_bytes_equal_an_independent_implementation(options: str, dtype: torch.dtype) -> None:
    q, seed = quantizer(options), torch.tensor(5)
    for x in values(dtype).values():
        t = q.quantize(x, seed=5)
        for direction, (operand, matrix) in enumerate(((t.row, x), (t.col, x.t()))):
            rows, cols = matrix.shape
            wide = math.ceil(cols / 16) * 16 if operand.quantizer.rht else cols
            random = RandomBits(seed, direction).bytes(rows, wide) if q.stochastic else None
            expect(operand, matrix, options, random)


@every_block
@pytest.mark.slow
def test_every_amax_has_the_right_scales(block: str) -> None:
    exponents = torch.exp2(torch.arange(-149.0, 128.0))
    for factor in (1, 1.3125, 1.9999999):
        for amax in (exponents * factor)[:, None, None]:
            x = amax * torch.tensor([[1.0, -0.97, 0.3, 0.11] * 5])
            expect(lpq.quantizer("nvfp4", block=block).quantize(x, col=False).row, x, f"block={block}", None)


# ------------------------------------------------------------------------------ layouts and laws


def test_only_square_blocks_without_rotation_and_chance_are_transposable() -> None:
    assert [o for o in OPTIONS if quantizer(o).transposable] == ["block=16x16, rht=false, stochastic=false"]
    row = lpq.quantizer("nvfp4").quantize(normal(16, 32)).row
    with pytest.raises(NotImplementedError, match="nvfp4 is not transposable: encode"):
        transpose(row)


# ------------------------------------------------------------------------------ the rotation


@pytest.mark.parametrize("shared", [48, 37, 1])
def test_a_gemm_of_two_rotated_operands_needs_no_inverse(shared: int) -> None:
    q = lpq.quantizer("nvfp4(rht=true)")
    dy, x = (q.quantize(normal(shared, n, seed=n), row=False).col for n in (40, 56))
    exact = dy.decode().double() @ x.decode().double().t()
    product = gemm(dy, x, dtype=torch.float32)
    assert product.shape == (40, 56)
    assert torch.allclose(product.double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item())
    mixed = gemm(dy, lpq.quantizer("mxfp8").quantize(normal(shared, 56, seed=56)).col, dtype=torch.float32)
    assert torch.allclose(mixed, product, rtol=0, atol=0.3 * product.abs().max().item())
    wrong = dy.decode_rotated()[:, :shared] @ x.decode().t()
    assert not torch.allclose(wrong, product, rtol=0, atol=0.3 * product.abs().max().item())


# ------------------------------------------------------------------------------ stochastic rounding

STOCHASTIC = [o for o in OPTIONS if "stochastic=false" not in o]


@pytest.mark.parametrize("options", STOCHASTIC)
def test_the_seed_decides_and_nothing_else(options: str) -> None:
    q, x = quantizer(options), normal(40, 130)
    state = torch.get_rng_state()
    one, again, other = (q.quantize(x, seed=s) for s in (7, 7, 8))
    assert equal_operands(one.row, again.row)
    assert equal_operands(one.col, again.col)
    assert not torch.equal(one.row.data, other.row.data)
    assert not torch.equal(one.col.data, other.col.data)
    assert torch.equal(one.row.scale.float(), other.row.scale.float())
    assert torch.equal(torch.get_rng_state(), state), "a seeded call must not draw from torch's generator"
    torch.manual_seed(0)
    drawn = q.quantize(x), q.quantize(x)
    torch.manual_seed(0)
    assert equal_operands(drawn[0].row, q.quantize(x).row)
    assert not equal_operands(drawn[0].row, drawn[1].row)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offset", [0, 5, 16])
def test_a_kernel_leaves_random_bits_of_cut_groups_to_the_reference(
    options: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else."""

    def found(*_: object) -> None:
        raise InterruptedError  # here it would be compiled for a GPU

    monkeypatch.setattr(cuda, "_bind_find", found)
    row, col = (quantizer(options).side(direction) for direction in ("row", "col"))
    for wanted in ((row, None), (None, col), (row, col)):
        e = Encoding(*wanted, (32, 32), torch.float32, torch.float32, torch.device("cpu"), offset=offset)
        cut = offset == 5 and wanted[1] is not None and options in STOCHASTIC
        with contextlib.nullcontext() if cut else pytest.raises(InterruptedError):
            assert cuda.bind(e) is None


# ------------------------------------------------------------------------------ limits


@every_dtype
def test_an_outlier_beyond_the_range_is_not_finite_once_rotated(dtype: torch.dtype) -> None:
    """16 of the largest number add up to 4 times as much, which is not silently brought back into range."""
    signs = torch.from_numpy(oracle.SIGNS)[:, None]
    x = (signs * torch.finfo(dtype).max).to(dtype)
    col = lpq.quantizer("nvfp4(rht=true)").quantize(x).col
    assert col.decode().isfinite().all() == (dtype == torch.float16)  # whose range fp32 exceeds by far


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_an_input_that_is_not_encoded_is_refused_in_words(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"{str(dtype).removeprefix('torch.')}.*cast it first"):
        lpq.quantizer("nvfp4").quantize(torch.ones(4, 32, dtype=dtype))


# ------------------------------------------------------------------------------ options and recipes


def test_options_and_their_text() -> None:
    assert str(lpq.quantizer("nvfp4(block=1x16, rht=false, stochastic=false)")) == "nvfp4"
    everything = "nvfp4(block=16x16, rht=true, stochastic=true)"
    assert str(lpq.quantizer(everything)) == everything
    with pytest.raises(OptionError, match="'1x16' or '16x16'"):
        lpq.quantizer("nvfp4(block=1x32)")
    with pytest.raises(OptionError, match="true or false"):
        lpq.quantizer("nvfp4", rht=1)


def test_the_full_recipe_rotates_wgrad_alone_and_rounds_only_gradients_by_chance() -> None:
    recipe = lpq.recipe("nvfp4")
    assert str(recipe.w) == "nvfp4(block=16x16)"
    assert str(recipe.x) == "nvfp4(rht=true)"
    assert str(recipe.dy) == "nvfp4(rht=true, stochastic=true)"
    rotations = {
        "fprop": (recipe.x.side("row").rotation, recipe.w.side("row").rotation),
        "dgrad": (recipe.dy.side("row").rotation, recipe.w.side("col").rotation),
        "wgrad": (recipe.dy.side("col").rotation, recipe.x.side("col").rotation),
    }
    both = (HADAMARD, HADAMARD)
    assert rotations == {"fprop": (None, None), "dgrad": (None, None), "wgrad": both}
    assert recipe.dy.side("row").stochastic
    assert recipe.dy.side("col").stochastic


@every_block
@pytest.mark.parametrize("shape", [(128, 256), (33, 40), (1, 16), (16, 1)])
def test_kernels_write_to_memory_as_the_layout_has_it(block: str, shape: tuple[int, int]) -> None:
    """The kernels' own allocation, which saves host time, is that of the storage."""
    side = quantizer(f"block={block}").side("row")
    x = torch.empty(shape, dtype=torch.bfloat16)
    make = bind_operand(side, Job(shape, x.dtype, x.device))
    buffers = make((None, None), torch.zeros(1), None, None).buffers
    for made, declared in zip(buffers, side.storage.fresh(side, shape, x).tensors(), strict=True):
        assert (made.shape, made.dtype) == (declared.shape, declared.dtype)
        assert made.stride() == declared.stride()
