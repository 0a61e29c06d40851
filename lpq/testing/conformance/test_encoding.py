"""The precision of encoding against the bits that it takes, for matrices of any shape and numbers of any size.

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

from lpq.formats import Quantizer
from lpq.testing.expect import gain, relative_error
from lpq.testing.operands import encode, few, measure, normal, stored_bits
from lpq.testing.options import only
from lpq.testing.table import cases, tall

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


EXPONENTS = {"one": range(10), "tiny": range(-30, -10), "small": range(-10, 0), "large": range(10, 11)}


@pytest.mark.parametrize("name", EXPONENTS)
def test_error_is_bounded(side: Quantizer, name: str) -> None:
    """A round trip of normal values, at four magnitudes and each power of two between them, is within the bound
    above."""
    magnitude = 2.0 ** EXPONENTS[name][0]
    x = normal(*SHAPE) * magnitude
    decoded = encode(side, x).decode()
    error, allowed, bits = relative_error(decoded, x), bound(side), stored_bits(side)
    assert error <= allowed, (
        f"{side}: the relative RMS error of normal values is {error:.4f}; {allowance(side)} {allowed:.4f}: "
        f"{remedy(decoded, x, allowed, magnitude)}"
    )
    assert error >= 2**-bits or bits >= 16, (
        f"{side}: the relative RMS error of normal values is {error:.2e}, which {bits:.2f} bits an element "
        "cannot reach: encode stores more than its layout declares"
    )
    error_of_a_shift = relative_error(decoded.roll(1, dims=1), x)
    assert error_of_a_shift > allowed, (
        f"{side}: {allowance(side)} {allowed:.4f}, which holds for values that were moved ({error_of_a_shift:.4f}): "
        "it would not see an error"
    )
    for exponent in EXPONENTS[name]:
        check_error(side, encode(side, x := up_to(exponent)).decode(), x, allowed)


def remedy(decoded: torch.Tensor, x: torch.Tensor, allowed: float, magnitude: float) -> str:
    """The remedy of an error, which may be one factor, or one of signs alone."""
    factor = gain(decoded, x)
    if factor != 0 and relative_error(decoded / factor, x) <= allowed:
        return f"decoded is {factor:.2f} times x; multiply in decode by what encode divides by"
    if relative_error(decoded.abs(), x.abs()) <= allowed:
        return "magnitudes come back and signs do not; keep the sign of each code"
    return f"of {magnitude:.3g} times normal values more must be kept, or error_bound say why not"


def test_values_come_back(side: Quantizer) -> None:
    """Values of each dtype, down to 1e-5, come back from a matrix of any size: rows, columns, and an outlier wherever
    it lies."""
    for case in (*cases(side, ("one", "1e-5")), tall()):
        x, what = case.matrix().float(), f"{side}: {case}"
        decoded, allowed = encode(side, case.matrix()).decode().float(), 3 * bound(side)
        if case.outlier is not None:
            loss = float((decoded - x)[case.outlier].abs() / x[case.outlier].abs())
            assert loss <= min(2 * allowed, 0.9), (
                f"{what}, comes back with the outlier off by {loss:.3f} of itself; {min(2 * allowed, 0.9):.3f} are "
                "allowed: measure the whole matrix, its first and last rows and columns too, and values of "
                "either sign"
            )
            continue
        error = relative_error(decoded, x)
        assert error <= allowed, (
            f"{what}, has the relative error {error:.3f}; at most {allowed:.3f} is allowed, three times "
            f"what {allowance(side)}: compute in fp32, and treat each size, dtype and place alike"
        )
        check_lines(side, str(case), decoded, x, min(2 * allowed, 0.9))


def check_lines(side: Quantizer, which: str, decoded: torch.Tensor, x: torch.Tensor, allowed: float) -> None:
    """Each row and each column comes back."""
    for dim, name in enumerate(("row", "column")):
        errors = ((decoded - x).square().mean(1 - dim) / x.square().mean(1 - dim)).sqrt()
        worst = int(errors.argmax())
        assert errors[worst] <= allowed, (
            f"{side}: {name} {worst} of {which} has the relative error {errors[worst]:.3f}; at most {allowed:.3f} is "
            "allowed: encode the whole matrix, however wide or high it is, and its last block even if that is ragged"
        )


@few
@given(rows=st.integers(1, 40), cols=st.integers(1, 140), seed=st.integers(0, 99))
@example(rows=1, cols=1, seed=0)
@example(rows=5, cols=40, seed=0)
@example(rows=5, cols=1025, seed=0)
@example(rows=3, cols=2 * 1024 + 200, seed=0)
@example(rows=1024 + 7, cols=3, seed=0)
def test_ragged_edges_do_no_harm(side: Quantizer, rows: int, cols: int, seed: int) -> None:
    """Values near ±1 come back from a matrix of any shape: each row and each column, the last ones too."""
    x = normal(rows, cols, seed=seed).sign() + normal(rows, cols, seed=seed + 1) * 0.1
    decoded = encode(side, x).decode()
    error, allowed = relative_error(decoded, x), 3 * bound(side)
    assert error <= allowed, (
        f"{side}: values near ±1 in a matrix {[rows, cols]} have the relative error {error:.3f}; at most "
        f"{allowed:.3f} is allowed: a ragged edge must be encoded as if it were padded with zeros, and cut off when "
        "it is decoded"
    )
    check_lines(side, f"a matrix {[rows, cols]} of values near ±1", decoded, x, min(2 * allowed, 0.9))


@only(lambda side: side.rotation is None, "is stored in its own basis")
def test_zeros_stay_zeros(side: Quantizer) -> None:
    """Also beside other values."""
    for x in (torch.zeros(20, 40), normal(20, 40) * (normal(20, 40, seed=1) > 0)):
        decoded = encode(side, x).decode()
        assert (decoded[x == 0] == 0).all(), (
            f"{side}: a zero comes back as {decoded[x == 0].abs().max().item():g}; it must stay 0, or what a mask or "
            "a ReLU set to zero counts again: give 0 a code of its own"
        )


PLACES = {
    (5, 40): [(0, 0), (3, 17), (4, 39)],
    (3, 1100): [(0, 128), (1, 700), (2, 1099)],
    (260, 5): [(130, 2), (259, 4)],
}
"""The places of one number that is not finite, by shape: in the first block, far from it, and in the last block."""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_non_finite_is_never_silently_finite(side: Quantizer, value: float, dtype: torch.dtype) -> None:
    """NaN and infinities come back as NaN or infinity, wherever they are; a NaN also where statistics come from a
    state, static ones too, which knows nothing of it."""
    for (rows, cols), places in PLACES.items():
        for at in places:
            clean = normal(rows, cols, dtype)
            x = clean.clone()
            x[at] = value
            stats = [(measure(side, x), "let the scale be NaN where the amax is not finite")]
            if math.isnan(value) and (before := remembered(side, clean)):
                remedy = f"keep a code for it, as -128 of INT8: here {sorted(before)} came from a step without it"
                stats.append((stats[0][0] | before, remedy))
            for known, remedy in stats:
                decoded = encode(side, x, known).decode()
                assert not decoded[at].isfinite(), (
                    f"{side}: {value} at {list(at)} of a matrix {[rows, cols]} in {dtype} comes back as "
                    f"{decoded[at].item():g}; it must come back as NaN or infinity, or a diverged training goes on "
                    f"unseen: {remedy}"
                )


def remembered(side: Quantizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The statistics that come from a state after a step with this matrix, static ones if the side can have them."""
    keeps, stats = side if side.state else side.frozen(), measure(side, x)
    state = {b.name: torch.zeros(b.shape) if keeps.moves else stats[b.name] for b in keeps.state}
    if keeps.moves:
        keeps.remember(state, stats)
    recalled = keeps.recall(state) if state else {}
    return {name: value for name, value in recalled.items() if value is not None}


def up_to(exponent: int) -> torch.Tensor:
    """Normal values, of which the largest ones of a row are a power of two: those beyond are cut."""
    return normal(16, 64).clamp(-2, 2).bfloat16().float() * 2.0 ** (exponent - 1)


def check_error(side: Quantizer, decoded: torch.Tensor, x: torch.Tensor, allowed: float) -> None:
    """Check that values of one magnitude come back."""
    error = relative_error(decoded, x)
    assert error <= allowed, (
        f"{side}: of values up to {x.abs().max():.3g} the relative RMS error is {error:.4f}; {allowance(side)} "
        f"{allowed:.4f}: scale the values so that they fit, with the scale that decode multiplies by, or let what is "
        "too large come back as infinity or NaN"
    )


LARGE = {"2^30": range(11, 31), "2^90": range(31, 91), "2^125": range(91, 127), "largest": ()}


@pytest.mark.parametrize("magnitude", LARGE)
def test_large_values_overflow_or_survive(side: Quantizer, magnitude: str) -> None:
    """Up to the largest bf16, at each power of two, a value comes back with its sign, or not finite: it never wraps
    around."""
    ones, allowed = normal(16, 64).sign() * torch.finfo(torch.bfloat16).max, bound(side)
    for x in map(up_to, LARGE[magnitude]) if LARGE[magnitude] else (ones,):
        decoded = encode(side, x).decode().float()
        wrapped = decoded.isfinite() & (decoded.sign() * x.sign() < 0)
        if side.rotation is None:
            assert not wrapped.any(), (
                f"{side}: {x[wrapped][0].item():.3g} comes back as {decoded[wrapped][0].item():.3g}; it must keep its "
                "sign: clamp to the range of the codes before you cast"
            )
        if decoded.isfinite().all():
            check_error(side, decoded, x, allowed if x is not ones else 2 * allowed)  # one value, no mean of many
