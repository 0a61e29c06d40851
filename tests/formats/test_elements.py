"""Every cast, against values enumerated from the element type's definition and rounded by search, in NumPy.

The inputs are all of bf16, every value and every boundary between two values with its neighbours in fp32, and
a million random bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpq.formats.elements import (
    E4M3,
    E5M2,
    FLT_MAX,
    cast_e2m1,
    cast_e2m1_stochastic,
    cast_e8m0,
    cast_float8,
    decode_e2m1,
    decode_e2m1_pairs,
    decode_e8m0,
    decode_float8,
    inverse_e8m0,
    pack_nibbles,
    rounded_to_e2m1,
    scale_float8,
    unpack_nibbles,
)

Array = NDArray[np.generic]


class Element(NamedTuple):
    """The non-negative finite values of an element type, in the order of their codes."""

    values: Array
    sign: int
    """The bit of the sign."""

    def nearest(self, x: Array) -> Array:
        """Codes of finite numbers, rounded to nearest even and saturated; boundaries are exact in float64."""
        magnitude = np.abs(x.astype(np.float64))
        above = np.searchsorted(self.values, magnitude).clip(1, len(self.values) - 1)
        middle = (self.values[above - 1] + self.values[above]) / 2
        even_above = above % 2 == 0
        code = np.where((magnitude > middle) | ((magnitude == middle) & even_above), above, above - 1)
        return (code | np.where(np.signbit(x), 1 << self.sign, 0)).astype(np.uint8)


def element(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> Element:
    values: list[float] = []
    for code in range(1 << exponent_bits + mantissa_bits):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        hidden = Fraction(mantissa, 1 << mantissa_bits) + (exponent > 0)
        values.append(float(hidden * Fraction(2) ** (max(exponent, 1) - bias)))
    assert largest in values
    return Element(np.array(values[: values.index(largest) + 1]), exponent_bits + mantissa_bits)


FLOAT8 = {E4M3: element(4, 3, 7, 448.0), E5M2: element(5, 2, 15, 57344.0)}
E2M1 = element(2, 1, 1, 6.0)


def floats(bits: Array) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def inputs(values: Array) -> Tensor:
    """fp32 numbers, most of them where a cast to these values could go wrong."""
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.5]]).astype(np.float32)
    near = (edges.view(np.uint32).astype(np.int64)[:, None] + np.arange(-2, 3)).clip(0).ravel()
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20)
    return floats(np.concatenate([np.arange(1 << 16) << 16, near, near | 1 << 31, random]))


def codes(t: Tensor) -> Array:
    return t.view(torch.uint8).numpy()


# ---------------------------------------------------------------------------------------------- 8-bit floats


def expected_float8(x: Tensor, dtype: torch.dtype) -> Array:
    numbers = x.numpy()
    expected = FLOAT8[dtype].nearest(np.nan_to_num(numbers))
    infinity = np.where(numbers > 0, 0x7C, 0xFC) if dtype == E5M2 else 0x7F
    return np.where(np.isnan(numbers), 0x7F, np.where(np.isinf(numbers), infinity, expected))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_cast_to_float8_rounds_to_nearest_even_saturates_and_keeps_what_is_not_finite(
    dtype: torch.dtype,
) -> None:
    x = inputs(FLOAT8[dtype].values)
    assert np.array_equal(codes(cast_float8(x, dtype)), expected_float8(x, dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scaled_cast_is_the_cast_of_the_product_and_saturates_where_that_overflows(
    dtype: torch.dtype,
) -> None:
    x = inputs(FLOAT8[dtype].values)
    for scale in (2.0**-140, 2.0**-40, 0.37, 1.0, 3.0, 2.0**100, FLT_MAX):
        exact = x.double() * torch.tensor(scale).double()
        product = torch.where(x.isfinite(), exact.clamp(-FLT_MAX, FLT_MAX).float(), x)
        scaled = codes(scale_float8(x, torch.tensor(scale), dtype))
        assert np.array_equal(scaled, expected_float8(product, dtype)), scale
    # The second of these products is infinite in fp32, its factor is not.
    x = torch.tensor([1e-30, 1e30, torch.inf, torch.nan])
    scaled = scale_float8(x, torch.tensor(1e30), dtype).float()
    assert scaled[:2].tolist() == [1.0, torch.finfo(dtype).max]
    assert not scaled[2:].isfinite().any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float8_decodes_to_its_value_and_encodes_back(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    decoded = decode_float8(every.view(dtype))
    number = ~decoded.isnan()
    magnitudes = decoded[: len(FLOAT8[dtype].values)].numpy()
    assert np.array_equal(magnitudes, FLOAT8[dtype].values)
    assert torch.equal(decoded[128:].nan_to_num(7.0), -decoded[:128].nan_to_num(-7.0))
    assert number.sum() == {E4M3: 254, E5M2: 250}[dtype]
    assert torch.equal(cast_float8(decoded, dtype).view(torch.uint8)[number], every[number])
    assert torch.equal(decoded[number], every.view(dtype).float()[number])


# ---------------------------------------------------------------------------------------------- E2M1


def test_the_cast_to_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    x = inputs(E2M1.values)
    numbers = x.numpy()
    expected = E2M1.nearest(np.nan_to_num(numbers, nan=6.0))
    assert np.array_equal(codes(cast_e2m1(x)), expected)
    without_nan = x[~x.isnan()]
    assert torch.equal(rounded_to_e2m1(without_nan), decode_e2m1(cast_e2m1(without_nan)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert decode_e2m1(cast_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_stochastic_rounding_is_one_rounded_sum_then_down_to_the_grid() -> None:
    r = np.arange(256)
    near = inputs(E2M1.values).numpy()
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.choice(near, 4096), rng.normal(0, 3, 4096).astype(np.float32)])
    y = y[np.isnan(y) | (np.abs(y) > 2.0**-20)]  # so that float64 holds every sum below
    magnitude = np.abs(np.nan_to_num(y, nan=6.0))[:, None]
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    total = (magnitude.astype(np.float64) + r / 256 * step).astype(np.float32)
    down = np.searchsorted(E2M1.values, total.ravel(), side="right").reshape(total.shape) - 1
    expected = down | np.where(np.signbit(y) & ~np.isnan(y), 8, 0)[:, None]
    x = torch.from_numpy(y)[:, None].expand(-1, 256)
    bits = torch.arange(256, dtype=torch.uint8).expand(len(y), 256)
    assert np.array_equal(codes(cast_e2m1_stochastic(x, bits)), expected)


def test_stochastic_rounding_is_unbiased_over_its_random_byte_and_nearest_rounding_is_not() -> None:
    step = torch.tensor([0.5] * 4 + [1.0] * 2 + [2.0])
    grid = torch.from_numpy(E2M1.values[:7]).float()
    x = (grid[:, None] + step[:, None] * torch.arange(256) / 256).reshape(-1, 1)
    bits = torch.arange(256, dtype=torch.uint8).expand(len(x), 256)
    mean = decode_e2m1(cast_e2m1_stochastic(x.expand(-1, 256), bits)).mean(1, keepdim=True)
    assert torch.equal(mean, x)
    assert (decode_e2m1(cast_e2m1(x)) - x).abs().max() == 1.0


def test_numbers_too_small_for_the_grid_stay_zero_when_rounded_stochastically() -> None:
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0**-30]).expand(256, 4)
    bits = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 4)
    assert not decode_e2m1(cast_e2m1_stochastic(tiny, bits)).any()


def test_e2m1_decodes_to_its_value() -> None:
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8)).numpy()
    assert np.array_equal(decoded, np.concatenate([E2M1.values, -E2M1.values]))
    assert np.signbit(decoded).tolist() == [False] * 8 + [True] * 8


def test_nibbles_pack_with_the_even_column_low_and_come_back() -> None:
    low, high = torch.arange(256, dtype=torch.uint8) % 16, torch.arange(256, dtype=torch.uint8) // 16
    pairs = torch.stack((low, high), dim=-1)
    packed = pack_nibbles(pairs)
    assert torch.equal(packed[:, 0], torch.arange(256, dtype=torch.uint8))
    assert torch.equal(unpack_nibbles(packed), pairs)
    assert torch.equal(decode_e2m1_pairs(packed).view(torch.int32), decode_e2m1(pairs).view(torch.int32))


# ---------------------------------------------------------------------------------------------- E8M0


def test_e8m0_is_the_least_power_of_two_that_is_enough() -> None:
    x = inputs(np.float64(2) ** np.arange(-149, 128)).abs()
    numbers = x.double().numpy()
    finite = np.isfinite(numbers)
    significand, exponent = np.frexp(np.where(finite & (numbers > 0), numbers, 1.0))
    expected = (exponent - (significand == 0.5) + 127).clip(0, 254)
    expected = np.where(numbers == 0, 0, np.where(finite, expected, 255))
    assert np.array_equal(codes(cast_e8m0(x)), expected)


def test_e8m0_decodes_to_a_power_of_two_and_its_inverse_undoes_it() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    exponent = np.arange(256) - 127.0
    assert np.array_equal(decode_e8m0(every).numpy()[:255], np.exp2(exponent)[:255])
    assert decode_e8m0(every)[255].isnan()
    assert np.array_equal(inverse_e8m0(every).numpy(), np.exp2(-exponent))


# ---------------------------------------------------------------------------------------------- all of them


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": lambda x: decode_float8(cast_float8(x, E4M3)),
    "e5m2": lambda x: decode_float8(scale_float8(x, torch.full((), 0.7, dtype=torch.float32), E5M2)),
    "e2m1": lambda x: decode_e2m1(cast_e2m1(x)),
    "e2m1 stochastic": lambda x: decode_e2m1(cast_e2m1_stochastic(x, torch.full(x.shape, 77, dtype=torch.uint8))),
    "e8m0": lambda x: decode_e8m0(cast_e8m0(x.abs())) * inverse_e8m0(cast_e8m0(x.abs())),
}


def sample() -> Tensor:
    return torch.randn(32, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 3


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_strides_and_shapes_change_nothing_and_the_input_is_kept(cast: Callable[[Tensor], Tensor]) -> None:
    x = sample()
    whole = cast(x)
    for view in (
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[:, None].expand(32, 2, 48),
        lambda t: t[:0],
    ):
        assert torch.equal(cast(view(x)), view(whole))
    assert torch.equal(cast(x[3, 4]), whole[3, 4])
    assert torch.equal(x, sample())


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_the_default_dtype_changes_nothing(cast: Callable[[Tensor], Tensor], default_dtype: torch.dtype) -> None:
    decoded = cast(sample())
    torch.set_default_dtype(torch.float32)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, cast(sample()))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_nan_has_one_code_whatever_its_sign_and_payload(dtype: torch.dtype) -> None:
    nan = floats(np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]))
    one = torch.tensor(1.0)
    assert codes(cast_float8(nan, dtype)).tolist() == [0x7F] * 6
    assert codes(scale_float8(nan, one, dtype)).tolist() == [0x7F] * 6
    assert cast_e2m1(nan).tolist() == [7] * 6
    assert cast_e2m1_stochastic(nan, torch.zeros(6, dtype=torch.uint8)).tolist() == [7] * 6
    assert cast_e8m0(nan.abs()).tolist() == [255] * 6
