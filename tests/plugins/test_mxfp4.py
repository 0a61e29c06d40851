"""MXFP4: its bytes against an independent implementation and one that engines use, its options and its limits."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from lpq_mxfp4.reference import exponents
from nasty import DTYPES, GOLDEN, normal, values

import lpq
from lpq.core import RandomBits, gemm
from lpq.formats.elements import unpack_nibbles
from lpq.registry.errors import OptionError

CEILINGS = {"floor": 8.0, "even": 7.0, "ceil": 6.0}
"""Up to which an amax may be, times the scale of its block."""
every_rule = pytest.mark.parametrize("rule", CEILINGS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


# ------------------------------------------------------------------------------ the definition


def exponent_of(amax: np.float32, rule: str) -> int:
    """The exponent byte of a block: the least whose scale takes the amax to its ceiling at most, or below it."""
    if not np.isfinite(amax):
        return 255
    for exponent in range(255):
        largest = float(amax) * 2.0 ** (127 - exponent)
        if largest < CEILINGS[rule] or (rule == "ceil" and largest == 6):
            return exponent
    raise AssertionError


def encode(x: np.ndarray, rule: str, random: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, exponents and decoded values of a matrix in fp32, block by block."""
    rows, cols = x.shape
    codes, exponent = np.zeros(x.shape, np.uint8), np.zeros((rows, -(-cols // 32)), np.uint8)
    decoded = np.zeros(x.shape, np.float32)
    for i, j in np.ndindex(exponent.shape):
        place = np.s_[i, j * 32 : (j + 1) * 32]
        e = exponent[i, j] = exponent_of(np.abs(x[place]).max(), rule)
        with np.errstate(over="ignore", under="ignore"):
            codes[place] = oracle.cast(
                x[place] * np.float32(2.0 ** (127 - int(e))), None if random is None else random[place]
            )
            scale = np.float32(np.nan if e == 255 else 2.0 ** (int(e) - 127))
            decoded[place] = (
                np.where(codes[place] & 8, -1, 1) * oracle.GRID[codes[place] & 7].astype(np.float32) * scale
            )
    return codes, exponent, decoded


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("side", ["row", "col"])
def test_golden_bytes(golden, golden_mxfp4, name: str, side: str) -> None:
    for rule, key in (("floor", ""), ("even", "_even")):
        expected = golden_mxfp4.buffers(name, f"mxfp4_{side}{key}")
        assert bool(expected) == (rule == "floor" or name == "normal")
        buffers = getattr(lpq.quantizer("mxfp4", scale=rule).quantize(golden.inputs[name]), side).buffers()
        assert all(torch.equal(buffers[buffer], bytes_) for buffer, bytes_ in expected.items())


@every_rule
@every_dtype
def test_bytes_equal_an_independent_implementation(rule: str, dtype: torch.dtype) -> None:
    for name, x in values(dtype).items():
        row = lpq.quantizer("mxfp4", scale=rule).quantize(x, col=False).row
        codes, exponent, decoded = encode(x.float().numpy(), rule)
        assert np.array_equal(unpack_nibbles(row.data)[:, : x.shape[1]].numpy(), codes), name
        assert not unpack_nibbles(row.data)[:, x.shape[1] :].any(), name
        assert np.array_equal(row.scale.numpy(), exponent), name
        assert np.array_equal(row.decode().numpy(), decoded, equal_nan=True), name


@pytest.mark.parametrize("rule", ["even", "ceil"])
@pytest.mark.parametrize("direction", ["row", "col"])
def test_random_bits_round_as_their_definition_says(rule: str, direction: str) -> None:
    x, seed = normal(40, 90), torch.tensor(7)
    made = getattr(lpq.quantizer("mxfp4", scale=rule, stochastic=True).quantize(x, seed=seed), direction)
    matrix = x if direction == "row" else x.t()
    bits = RandomBits(seed, int(direction == "col")).bytes(*matrix.shape).numpy()
    codes, exponent, _ = encode(matrix.contiguous().numpy(), rule, bits)
    assert np.array_equal(unpack_nibbles(made.data)[:, : matrix.shape[1]].numpy(), codes)
    assert np.array_equal(made.scale.numpy(), exponent)


@every_rule
def test_a_rotated_column_operand_is_the_rotated_matrix(rule: str) -> None:
    x = normal(90, 40)
    turned = oracle.rotate(x.t().contiguous().numpy())
    codes, exponent, _ = encode(turned, rule)
    col = lpq.quantizer("mxfp4", scale=rule, rht=True).quantize(x).col
    assert np.array_equal(unpack_nibbles(col.data)[:, :96].numpy(), codes)
    assert np.array_equal(col.scale.numpy(), exponent)
    assert torch.equal(
        lpq.quantizer("mxfp4", scale=rule, rht=True).quantize(x).row.data,
        lpq.quantizer("mxfp4", scale=rule).quantize(x).row.data,
    )


@every_rule
def test_every_amax_has_the_right_exponent(rule: str) -> None:
    powers = torch.exp2(torch.arange(-149.0, 128.0))
    amaxes = torch.cat([powers, powers * 1.5, powers * 1.75, torch.tensor([0.0, torch.finfo(torch.float32).max])])
    bits = amaxes[amaxes.isfinite()].view(torch.int32)
    amaxes = torch.cat([(bits + i).clamp(0, 0x7F7FFFFF) for i in range(-2, 3)]).view(torch.float32)
    assert exponents(amaxes, rule).tolist() == [exponent_of(amax, rule) for amax in amaxes.numpy()]


def test_bytes_equal_those_of_compressed_tensors() -> None:
    """The library whose layout exports have computes the same scales with ``even``, and the same elements."""
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    elements = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    grid = pytest.importorskip("compressed_tensors.quantization.utils.fp4_utils")
    x = normal(64, 256).bfloat16() * torch.exp2(torch.arange(64.0) - 32)[:, None].bfloat16()
    scale = helpers.generate_mx_scales(x.view(64, 8, 32).abs().amax(2)).to(torch.uint8)
    row = lpq.quantizer("mxfp4(scale=even)").quantize(x, col=False).row
    assert torch.equal(row.scale, scale)
    scaled = x.float().view(64, 8, 32) / torch.exp2(scale.float() - 127)[:, :, None]
    packed = elements.pack_fp4_to_uint8(grid.cast_to_fp4(scaled.clamp(-6, 6)).view(64, 256))
    assert torch.equal(row.data, packed)


# ------------------------------------------------------------------------------ what rules and options do


@pytest.mark.parametrize(
    ("values", "floor", "even", "ceil"),
    [
        (torch.distributions.Normal(0.0, 1.0), 0.115, 0.112, 0.116),
        (torch.distributions.StudentT(4.0), 0.132, 0.129, 0.139),
        (torch.distributions.Uniform(-0.5, 0.5), 0.144, 0.099, 0.099),
    ],
    ids=["normal", "student", "uniform"],
)
def test_what_the_rules_cost(values: torch.distributions.Distribution, floor: float, even: float, ceil: float) -> None:
    """The table on the page of the format: relative RMS errors."""
    torch.manual_seed(0)
    x = values.sample((2048, 1024))
    for rule, expected in (("floor", floor), ("even", even), ("ceil", ceil)):
        error = lpq.quantizer("mxfp4", scale=rule).quantize(x, col=False).dequantize() - x
        assert (error.norm() / x.norm()).item() == pytest.approx(expected, abs=0.002), rule


def test_stochastic_rounding_is_unbiased_only_where_nothing_saturates() -> None:
    """With scales rounded up the error of the mean of 64 draws is a 64th of the error of one."""
    x = normal(128, 256)
    for rule, unbiased in (("even", False), ("ceil", True)):
        quantizer = lpq.quantizer("mxfp4", scale=rule, stochastic=True)
        draws = torch.stack([quantizer.quantize(x, col=False, seed=torch.tensor(i)).dequantize() for i in range(64)])
        one, mean = (draws - x).square().mean(), (draws.mean(0) - x).square().mean()
        assert (quantizer.unbiased, bool(mean < 1.1 * one / 64)) == (unbiased, unbiased)
    with pytest.raises(OptionError, match="set scale=ceil, which has none"):
        lpq.quantizer("mxfp4(stochastic=true)")


def test_rotated_operands_are_multiplied_in_their_basis() -> None:
    """The product of two rotated operands is the product of what they stand for; and NVFP4's rotation is the same."""
    x, y = normal(64, 48), normal(64, 80, seed=1)
    first = lpq.quantizer("mxfp4(rht=true)").quantize(x, row=False).col
    for other in ("mxfp4(rht=true)", "nvfp4(rht=true)"):
        second = lpq.quantizer(other).quantize(y, row=False).col
        assert first.quantizer.basis == second.quantizer.basis
        assert torch.allclose(gemm(first, second, dtype=torch.float32), first.decode() @ second.decode().t(), atol=1e-3)


def test_options_and_their_text() -> None:
    assert str(lpq.quantizer("mxfp4", scale="floor", stochastic=False)) == "mxfp4"
    assert str(lpq.quantizer("mxfp4(stochastic=true, scale=ceil)")) == "mxfp4(scale=ceil, stochastic=true)"
    with pytest.raises(OptionError, match="'floor' or 'even' or 'ceil'"):
        lpq.quantizer("mxfp4(scale=up)")
    recipe = lpq.recipe("mxfp4")
    assert recipe.wgrad.a.side("col").basis == recipe.wgrad.b.side("col").basis is not None
    assert recipe.dgrad.a.side("row").unbiased
    assert str(lpq.recipe("mxfp4-fwd-mxfp8-bwd").dgrad.a.side("row")) == "mxfp8"
