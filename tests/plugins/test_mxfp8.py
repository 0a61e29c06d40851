"""MXFP8: its bytes against the golden file and an independent implementation, its layouts and its limits."""

from __future__ import annotations

import fp8_oracle as oracle
import numpy as np
import pytest
import torch
from nasty import DTYPES, GOLDEN, normal, values
from support.comparing import as_bytes

import lpq
from lpq.registry.errors import OptionError

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
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
def test_bytes_equal_an_independent_implementation(element: str, dtype: torch.dtype) -> None:
    for name, x in values(dtype).items():
        row = quantizer(element).quantize(x).row
        codes, exponents, decoded = encode(x.float().numpy(), element)
        assert (row.data.dtype, row.scale.dtype) == (ELEMENTS[element], torch.uint8)
        assert np.array_equal(as_bytes(row.data).view(x.shape).numpy(), codes), name
        assert np.array_equal(row.scale.numpy(), exponents), name
        assert np.array_equal(row.decode().numpy(), decoded, equal_nan=True), name


@every_element
def test_every_amax_has_the_right_exponent(element: str) -> None:
    largest = torch.finfo(ELEMENTS[element]).max
    powers = torch.exp2(torch.arange(-149.0, 128.0))
    amaxes = torch.cat([powers, powers * largest, torch.tensor([0.0, torch.finfo(torch.float32).max])])
    bits = amaxes[amaxes.isfinite()].view(torch.int32)
    amaxes = torch.cat([(bits + i).clamp(0, 0x7F7FFFFF) for i in range(-2, 3)]).view(torch.float32)
    scale = quantizer(element).quantize(amaxes[:, None]).row.scale[:, 0]
    assert scale.tolist() == [exponent_of(amax, element) for amax in amaxes.numpy()]


def test_encode_uses_the_statistics_that_it_is_given() -> None:
    q, x = lpq.quantizer("mxfp8"), normal(40, 130)
    half = {name: t / 2 for name, t in q.measure(x).items()}
    assert torch.equal(q.encode(x, half).scale, q.encode(x, q.measure(x)).scale - 1)


def test_options_and_their_text() -> None:
    assert str(lpq.quantizer("mxfp8", dtype="e4m3")) == "mxfp8"
    assert str(lpq.quantizer("mxfp8(dtype=e5m2)")) == "mxfp8(dtype=e5m2)"
    with pytest.raises(OptionError, match="'e4m3' or 'e5m2'"):
        lpq.quantizer("mxfp8(dtype=e3m4)")
