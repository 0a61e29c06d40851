"""Encoding is a pure function, and what it keeps is as good as the bits it takes.

The error bound: of the ``b`` bits that an element takes, half may buy range (the exponent of E5M2 does),
the other half must buy precision: normally distributed values come back with a relative RMS error of at
most ``2^(-b/2)``, √2 times that where rounding is stochastic. And no code of ``b`` bits does better than
``2^-b``: a smaller error means that bytes are kept outside the layout. The bound is loose by a factor of
1.3 (E5M2) to 9 (INT8); a scale that is lost, a block that is shifted or a sign that is dropped is off by
far more, and the test shows that it would see that.

That suits neither logarithms nor codes that leave bits of a byte empty: a quantizer with an ``error_bound``
is held to that instead.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lpq.core import Quantizer
from lpq.testing.expect import relative_error, same, same_operand
from lpq.testing.operands import encode, few, measure, normal, stored_bits
from lpq.testing.options import only

SHAPE = (160, 256)


def bound(side: Quantizer) -> float:
    """The relative RMS error that normal values may have: its ``error_bound``, or else what its bits allow."""
    own: float | None = getattr(side, "error_bound", None)
    if own is not None:
        return own
    allowed = 2 ** (-stored_bits(side) / 2)
    return allowed * math.sqrt(2) if side.stochastic else allowed


def allowance(side: Quantizer) -> str:
    """Where the bound comes from, as in ``… 0.0625``."""
    own = getattr(side, "error_bound", None) is not None
    return "its error_bound is" if own else f"{stored_bits(side):.2f} bits an element allow"


@pytest.mark.parametrize("magnitude", [2.0**-10, 1.0, 2.0**10], ids=["small", "one", "large"])
def test_error_is_bounded(side: Quantizer, magnitude: float) -> None:
    """A round trip of normal values, at three magnitudes, is within the bound above."""
    x = normal(*SHAPE) * magnitude
    decoded = encode(side, x).decode()
    error, allowed, bits = relative_error(decoded, x), bound(side), stored_bits(side)
    assert error <= allowed, (
        f"{side}: the relative RMS error of normal values is {error:.4f}; {allowance(side)} {allowed:.4f}"
    )
    assert error >= 2**-bits or bits >= 16, (
        f"{side}: the relative RMS error of normal values is {error:.2e}, which {bits:.2f} bits an element "
        "cannot reach: encode stores more than its layout says"
    )
    moved = relative_error(decoded.roll(1, dims=1), x)
    assert moved > allowed, (
        f"{side}: {allowance(side)} {allowed:.4f}, which holds for values that were moved ({moved:.4f}): "
        "it would not see an error"
    )


@few
@given(rows=st.integers(1, 40), cols=st.integers(1, 140), seed=st.integers(0, 99))
@example(rows=1, cols=1, seed=0)
@example(rows=5, cols=40, seed=0)
def test_ragged_edges_do_no_harm(side: Quantizer, rows: int, cols: int, seed: int) -> None:
    """Values near ±1 come back from a matrix of any shape, those of its last row and column too."""
    x = normal(rows, cols, seed=seed).sign() + normal(rows, cols, seed=seed + 1) * 0.1
    decoded = encode(side, x).decode()
    for part, what in ((..., "the values"), ((-1,), "the last row"), ((..., -1), "the last column")):
        error = relative_error(decoded[part], x[part])
        assert error <= 3 * bound(side), f"{side}, {what} of a matrix {[rows, cols]}: relative error {error:.3f}"


@only(lambda side: not side.stochastic and side.rotation is None, "rounds to nearest in its own basis")
def test_what_it_represents_stays(side: Quantizer) -> None:
    """A decoded matrix is representable: encoding it again moves it by less than 1 % of the first error."""
    x = normal(*SHAPE)
    once = encode(side, x).decode().float()
    twice = encode(side, once).decode().float()
    first, second = relative_error(once, x), relative_error(twice, once)
    assert second <= 0.01 * first + 1e-6, (
        f"{side}: encoding a decoded matrix again moves it by {second:.2e}; the first error was {first:.2e}"
    )


@only(lambda side: side.rotation is None, "is stored in its own basis")
def test_zeros_stay_zeros(side: Quantizer) -> None:
    """Also beside other values."""
    for x in (torch.zeros(20, 40), normal(20, 40) * (normal(20, 40, seed=1) > 0)):
        decoded = encode(side, x).decode()
        assert (decoded[x == 0] == 0).all(), f"{side}: a zero comes back as {decoded[x == 0].abs().max().item()}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_non_finite_is_never_silently_finite(side: Quantizer, value: float, dtype: torch.dtype) -> None:
    """NaN and infinities come back as NaN or infinity."""
    for at in ((0, 0), (3, 17), (4, 39)):
        x = normal(5, 40, dtype)
        x[at] = value
        decoded = encode(side, x).decode()
        assert not decoded[at].isfinite(), f"{side}: {value} at {list(at)} comes back as {decoded[at].item()}"


def test_large_values_overflow_or_survive(side: Quantizer) -> None:
    """Near the top of bf16 a value comes back with its sign, or not finite: it never wraps around."""
    x = normal(16, 64).clamp(-4, 4).bfloat16().float() * 2.0**125
    decoded = encode(side, x).decode().float()
    wrapped = decoded.isfinite() & (decoded.sign() * x.sign() < 0)
    if side.rotation is None:
        assert not wrapped.any(), f"{side}: {x[wrapped][0].item():.3g} comes back as {decoded[wrapped][0].item():.3g}"
    if decoded.isfinite().all():
        error, allowed = relative_error(decoded, x), bound(side)
        assert error <= allowed, (
            f"{side}: near the top of bf16 the relative RMS error is {error:.4f}; {allowance(side)} {allowed:.4f}: "
            "scale the values so that they fit, or let them come back as infinity or NaN"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_encode_is_pure(side: Quantizer, dtype: torch.dtype) -> None:
    """The same bytes twice, the inputs and torch's generator untouched, and strides do not matter."""
    x = normal(24, 72, dtype)
    kept, stats, generator = x.clone(), measure(side, x), torch.get_rng_state()
    kept_stats = {name: tensor.clone() for name, tensor in stats.items()}
    first = encode(side, x, stats)
    first = first.map(torch.clone)
    same(x, kept, f"{side}: encode changed its input")
    for name, tensor in kept_stats.items():
        same(stats[name], tensor, f"{side}: encode changed the statistic {name!r}")
    same_operand(encode(side, x, stats), first, f"{side}: encoding the same matrix a second time")
    assert torch.equal(torch.get_rng_state(), generator), f"{side}: encode draws from torch's generator"
    strided = torch.empty(72, 48, dtype=dtype).t()[::2].copy_(x)
    same_operand(encode(side, strided), first, f"{side}: encoding the same values from a strided view")
    expanded = x[:1].expand(24, 72)
    repeated = encode(side, expanded.contiguous())
    same_operand(encode(side, expanded), repeated, f"{side}: encoding an expanded view")


@only(lambda side: side.stochastic, "rounds stochastically")
def test_stochastic_rounding_is_unbiased(side: Quantizer) -> None:
    """The mean of many roundings approaches the value, and each seed gives bytes of its own."""
    x = normal(32, 64)
    rounded = [encode(side, x, seed=seed).decode() for seed in range(64)]
    assert not torch.equal(rounded[0], rounded[1]), f"{side}: two seeds give the same rounding"
    one, mean = relative_error(rounded[0], x), relative_error(torch.stack(rounded).mean(0), x)
    assert mean < one / 3, f"{side}: the mean of 64 roundings is off by {mean:.4f}, a single one by {one:.4f}"
