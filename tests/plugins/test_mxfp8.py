"""MXFP8: its bytes against the golden file and an independent implementation, its layouts and its limits."""

from __future__ import annotations

import math

import fp8_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nasty import DTYPES, GOLDEN, VALUES, bytes_of, normal, values

import lpq
from lpq.registry.errors import OptionError

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BITS = {"e4m3": 3, "e5m2": 2}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def quantizer(element: str):
    return lpq.quantizer("mxfp8", dtype=element)


# ------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("side", ["row", "col"])
def test_golden_bytes(golden, name: str, side: str) -> None:
    buffers = getattr(lpq.quantizer("mxfp8").quantize(golden.inputs[name]), side).buffers()
    expected = golden.buffers(name, f"mxfp8_{side}")
    assert list(buffers) == list(expected) == ["data", "scale"]
    assert torch.equal(buffers["data"].view(torch.uint8), expected["data"])
    assert torch.equal(buffers["scale"], expected["scale"])


def exponent_of(amax: np.float32, element: str) -> int:
    """The exponent byte of a block, from the bits of its amax."""
    if not np.isfinite(amax):
        return 255
    v = np.float32(amax * np.float32(1 / oracle.ELEMENTS[element][3]))
    bits = int(v.view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return exponent + (mantissa > 0x400000 if exponent == 0 else mantissa != 0)


def encode(x: np.ndarray, element: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, exponents and decoded values of a matrix in fp32, block by block."""
    rows, cols = x.shape
    codes, exponents = np.zeros(x.shape, np.uint8), np.zeros((rows, -(-cols // 32)), np.uint8)
    decoded = np.zeros(x.shape, np.float32)
    for i, j in np.ndindex(exponents.shape):
        place = np.s_[i, j * 32 : (j + 1) * 32]
        e = exponents[i, j] = exponent_of(np.abs(x[place]).max(), element)
        codes[place] = oracle.cast(x[place] * np.float32(2.0 ** (127 - int(e))), element)
        scale = np.float32(np.nan if e == 255 else 2.0 ** (int(e) - 127))
        with np.errstate(over="ignore"):
            decoded[place] = oracle.decode(codes[place], element) * scale
    return codes, exponents, decoded


@every_element
@every_dtype
@pytest.mark.parametrize("value", VALUES)
def test_bytes_equal_an_independent_implementation(element: str, dtype: torch.dtype, value: str) -> None:
    x = values(dtype)[value]
    row = quantizer(element).quantize(x).row
    codes, exponents, decoded = encode(x.float().numpy(), element)
    assert np.array_equal(bytes_of(row.data).view(x.shape).numpy(), codes)
    assert np.array_equal(row.scale.numpy(), exponents)
    assert np.array_equal(row.decode().numpy(), decoded, equal_nan=True)


@every_element
def test_every_amax_has_the_right_exponent(element: str) -> None:
    largest = torch.finfo(ELEMENTS[element]).max
    powers = torch.exp2(torch.arange(-149.0, 128.0))
    amaxes = torch.cat([powers, powers * largest, torch.tensor([0.0, torch.finfo(torch.float32).max])])
    bits = amaxes[amaxes.isfinite()].view(torch.int32)
    amaxes = torch.cat([(bits + i).clamp(0, 0x7F7FFFFF) for i in range(-2, 3)]).view(torch.float32)
    scale = quantizer(element).quantize(amaxes[:, None]).row.scale[:, 0]
    assert scale.tolist() == [exponent_of(amax, element) for amax in amaxes.numpy()]


@every_element
def test_no_element_saturates_and_the_error_is_half_a_step(element: str) -> None:
    x = normal(64, 320) * torch.logspace(-9, 9, 320)
    row = quantizer(element).quantize(x).row
    scale = torch.exp2(row.scale.float() - 127).repeat_interleave(32, 1)
    assert (x.abs() <= scale * torch.finfo(ELEMENTS[element]).max).all()
    amax = x.view(64, 10, 32).abs().amax(2, keepdim=True).expand(64, 10, 32).reshape(64, 320)
    assert (scale * torch.finfo(ELEMENTS[element]).max < 2 * amax).all(), "a smaller power of two would do"
    bound = torch.maximum(x.abs() * 2.0 ** -(BITS[element] + 1), scale * SMALLEST[element] / 2)
    error = (row.decode() - x).abs()
    assert (error <= bound).all()
    assert (error > bound * 0.8).any()


# ------------------------------------------------------------------------------ layouts and laws


@every_element
@given(rows=st.integers(0, 100), cols=st.integers(0, 100))
def test_canonical_buffers_of_any_shape(element: str, rows: int, cols: int) -> None:
    x = normal(rows, cols)
    t = quantizer(element).quantize(x)
    for operand, (high, wide) in ((t.row, (rows, cols)), (t.col, (cols, rows))):
        data, scale = operand.tensors()
        assert list(operand.buffers()) == ["data", "scale"]
        assert (data.dtype, data.shape) == (ELEMENTS[element], (high, wide))
        assert (scale.dtype, scale.shape) == (torch.uint8, (high, math.ceil(wide / 32)))
        assert data.is_contiguous()
        assert scale.is_contiguous()
    padded = quantizer(element).quantize(torch.nn.functional.pad(x, (0, -cols % 32, 0, -rows % 32)))
    assert torch.equal(t.dequantize(), padded.dequantize()[:rows, :cols])
    assert torch.equal(t.row.scale, padded.row.scale[:rows])
    assert torch.equal(t.col.scale, padded.col.scale[:cols])


def test_the_declared_statistics_are_the_amaxes_of_the_blocks() -> None:
    q = lpq.quantizer("mxfp8")
    x = normal(40, 130)
    assert [(s.name, s.block) for s in q.stats] == [("amax", (1, 32))]
    measured = q.measure(x)
    padded = torch.nn.functional.pad(x, (0, 30)).view(40, 5, 32)
    assert torch.equal(measured["amax"], padded.abs().amax(2))
    half = {name: t / 2 for name, t in measured.items()}
    assert torch.equal(q.encode(x, half).scale, q.encode(x, measured).scale - 1), "encode must use what it is given"


# ------------------------------------------------------------------------------ limits


@every_element
@every_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_non_finite_element_is_nan_and_no_other(element: str, dtype: torch.dtype, value: float) -> None:
    q = quantizer(element)
    clean = normal(64, 96, dtype=dtype)
    x = clean.clone()
    x[3, 40] = value
    t, before = q.quantize(x), q.quantize(clean)
    for operand, kept, (row, col) in ((t.row, before.row, (3, 40)), (t.col, before.col, (40, 3))):
        decoded, expected = operand.decode(), kept.decode()
        touched = torch.zeros(operand.shape, dtype=torch.bool)
        touched[row, col // 32 * 32 : (col // 32 + 1) * 32] = True
        assert decoded[touched].isnan().all()
        assert torch.equal(decoded[~touched], expected[~touched])
        assert (operand.scale == 255).sum() == 1


@every_element
@every_dtype
def test_powers_of_two_come_back_from_the_least_to_the_largest(element: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    low, high = round(math.log2(info.smallest_normal * info.eps)), math.floor(math.log2(info.max))
    x = torch.exp2(torch.arange(low, high + 1, dtype=torch.float64)).to(dtype)[:, None]
    decoded = quantizer(element).quantize(x).row.decode()
    smallest = 2.0**-127 * SMALLEST[element]  # of the values under the smallest scale
    assert torch.equal(decoded, torch.where(x.double() >= smallest, x.float(), 0.0))
    assert not quantizer(element).quantize(torch.zeros(3, 40, dtype=dtype)).row.decode().any()


@every_element
@every_dtype
def test_the_largest_number_is_rounded_as_any_other(element: str, dtype: torch.dtype) -> None:
    x = torch.full((2, 40), torch.finfo(dtype).max, dtype=dtype)
    row = quantizer(element).quantize(x).row
    value = row.data.double() * torch.exp2(row.scale.double() - 127)[:, :1]
    assert ((value - x.double()).abs() <= x.double() / 2 ** (BITS[element] + 1)).all()
    assert torch.equal(row.decode(), value.float())  # which is infinite, where it was rounded up to 2^128


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_an_input_that_is_not_encoded_is_refused_in_words(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"{str(dtype).removeprefix('torch.')}.*cast it first"):
        lpq.quantizer("mxfp8").quantize(torch.ones(4, 32, dtype=dtype))


def test_options_and_their_text() -> None:
    assert str(lpq.quantizer("mxfp8", dtype="e4m3")) == "mxfp8"
    assert str(lpq.quantizer("mxfp8(dtype=e5m2)")) == "mxfp8(dtype=e5m2)"
    with pytest.raises(OptionError, match="'e4m3' or 'e5m2'"):
        lpq.quantizer("mxfp8(dtype=e3m4)")
