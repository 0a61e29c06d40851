"""Rounding does not drift: what was rounded stays, ties go either way, no factor is left, and rounding with random bits
is right on average.

A bias that is far below the error of one value adds up over the terms of a product, and over the steps of a training.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.blocks import block_amax, expand_blocks
from lpq.testing.expect import gain, relative_error
from lpq.testing.operands import encode, normal
from lpq.testing.options import only

SEEDS = 64
PROBES = 2048
"""The values of each sign that are tried, to see which ones come back."""
BESIDE = 2.0**-14
"""The relative distance from a tie within which values are equal to it in bf16."""
SMALL = 1 << 14
"""Values in each octave whose roundings are averaged."""
HITS = 4
"""A value that comes back for fewer inputs may have neighbours that did not come back."""


@only(lambda side: not side.stochastic and side.rotation is None, "rounds to nearest in its own basis")
def test_what_it_represents_stays(side: Quantizer) -> None:
    """A decoded matrix is representable: encoding it again moves it by less than 1 % of the first error."""
    x = normal(160, 256)
    once = encode(side, x).decode().float()
    twice = encode(side, once).decode().float()
    first, second = relative_error(once, x), relative_error(twice, once)
    assert second <= 0.01 * first + 1e-6, (
        f"{side}: encoding a decoded matrix again moves it by {second:.2e}, {gain(twice, once):.3f} times itself; the "
        f"first error was {first:.2e}, and 1 % of it is allowed: divide in encode by what decode multiplies by, so "
        "that what decode returns gets its codes again, or say in known_failures why its scale is another one"
    )


@only(lambda side: not side.stochastic and side.rotation is None, "rounds to nearest in its own basis")
def test_ties_go_either_way(side: Quantizer) -> None:
    """Half-way between two values that it represents, some go up and some down, as to even: a mean does not drift.

    A value beside a tie goes to the nearer one, unless it was rounded before. This is for values that are evenly spaced
    and found among the decoded ones: not for 16 bits, nor for logarithms."""
    units = _units(side)
    if units is None:
        pytest.skip(f"{side} represents no values that are evenly spaced and few enough to be found")
    for sign, what in ((1, "above"), (-1, "below")):
        levels = _levels(side, units, sign)
        lower, upper = levels[:-1], levels[1:]
        ties = (lower + upper) / 2
        decoded = _between_ends(side, ties * sign, units) * sign
        astray = (decoded != lower) & (decoded != upper)
        if astray.any():
            at = int(astray.nonzero()[0])
            raise AssertionError(
                f"{side}: {ties[at] * sign:g}, half-way between {lower[at] * sign:g} and {upper[at] * sign:g}, comes "
                f"back as {decoded[at] * sign:g}; it must be one of the two: round in encode, in fp32"
            )
        for nearer, place in ((lower, 1 - BESIDE), (upper, 1 + BESIDE)):
            decoded_beside = _between_ends(side, ties * sign * place, units) * sign
            if (decoded_beside != nearer).any():
                at = int((decoded_beside != nearer).nonzero()[0])
                further = _between_ends(side, ties * sign * (1 + 256 * (place - 1)), units) * sign
                remedy = (
                    "do not round x to a shorter dtype before its codes are made"
                    if further[at] == nearer[at]
                    else "round to the nearest code, as torch.round does, and not down or up"
                )
                raise AssertionError(
                    f"{side}: {ties[at] * sign * place:.7g}, beside the middle of {lower[at] * sign:g} and "
                    f"{upper[at] * sign:g}, comes back as {decoded_beside[at] * sign:g}; it must be "
                    f"{nearer[at] * sign:g}: {remedy}"
                )
        outward = int((decoded == upper).sum())
        if len(ties) >= 4:
            assert len(ties) / 4 <= outward <= len(ties) * 3 / 4, (
                f"{side}: {outward} of {len(ties)} ties {what} zero are rounded away from zero, the others towards it; "
                "about half of them must be: round a tie to the even neighbour, as torch.round does"
            )


@only(lambda side: not side.stochastic and side.rotation is None, "rounds to nearest in its own basis")
def test_no_value_is_lost_beside_a_neighbour(side: Quantizer) -> None:
    """No value loses half of itself where another value comes back that is three times as near to it, be they spaced
    evenly or not: a cast that takes subnormal elements for zeros loses small gradients."""
    probes = torch.cat([torch.linspace(0, 1, PROBES)[1:], torch.logspace(-24, 0, PROBES, base=2)])
    for sign in (1, -1):
        decoded = _decoded(side, probes * sign, 1.0) * sign
        values, hits = torch.unique(decoded, return_counts=True)
        levels = values[hits >= HITS]  # of the others it may depend on the values beside it whether they come back
        if len(levels) < 2:
            continue
        above = torch.searchsorted(levels, probes).clamp(1, len(levels) - 1)
        nearest = torch.where(probes - levels[above - 1] < levels[above] - probes, levels[above - 1], levels[above])
        lost = (decoded < probes / 2) & (probes - decoded > 3 * (probes - nearest).abs())
        assert not lost.any(), (
            f"{side}: {sign * probes[lost][0]:.4g}, beside a value of 1, comes back as {sign * decoded[lost][0]:.4g}, "
            f"though {sign * nearest[lost][0]:.4g} can come back: round to the nearest code, the least ones too "
            "(subnormal numbers of an element type are codes like others)"
        )


def _units(side: Quantizer) -> float | None:
    """The largest unit in which the values that come back are whole numbers; None: there is none, or it cannot be
    found, as where the scale of a block is the best for all its values."""
    levels, probes = _levels(side, 1.0), torch.linspace(0, 1, PROBES + 1)
    in_another_order = _between_ends(side, probes.flip(0), 1.0).flip(0)
    if len(levels) < 3 or not torch.equal(_between_ends(side, probes, 1.0), in_another_order):
        return None
    units = float(1 / (levels[1:] - levels[:-1]).min())
    whole = float(round(units))
    if abs(units - whole) > 1e-3 * units:
        return None
    levels = _levels(side, whole)
    return whole if len(levels) >= 3 and torch.equal(levels, levels.round()) else None


def _levels(side: Quantizer, largest: float, sign: int = 1) -> Tensor:
    """The values of one sign that come back, without that, if the largest one is this: neighbours without a gap."""
    probes = torch.linspace(0, largest, PROBES + 1, dtype=torch.float64).float()
    values, hits = torch.unique(_between_ends(side, probes * sign, largest) * sign, return_counts=True)
    rare = (hits < HITS).nonzero()
    inside = rare[(rare > 0) & (rare < len(values) - 1)]  # the first and the last have half an interval
    first = int(inside.max()) + 1 if len(inside) else 0
    levels: Tensor = values[first:]
    return levels


def _between_ends(side: Quantizer, values: Tensor, largest: float) -> Tensor:
    """The values, encoded beside the largest magnitude of either sign, as zero points need it, and decoded."""
    return _decoded(side, values, -largest, largest)


def _decoded(side: Quantizer, values: Tensor, *beside: float) -> Tensor:
    """The values, encoded in rows of these others, and decoded, whatever shares a scale with them."""
    x = torch.tensor(beside).repeat(len(values), 8 // len(beside))
    x[:, 1] = values
    return encode(side, x).decode()[:, 1]


def test_no_factor_is_left(side: Quantizer) -> None:
    """Decoded normal values are hardly longer or shorter along the values: this multiplies from layer to layer.

    Codes that are the means of their values shrink by the square of the error, and clipping shrinks by more. Logarithms
    that are rounded to the nearest make values longer, by as much as the square of the error."""
    x = normal(160, 256)
    decoded = encode(side, x).decode()
    factor, error = gain(decoded, x), relative_error(decoded, x)
    least, most = 1 - error**2 - 0.3 * error - 1e-6, 1 + error**2 + 0.1 * error + 1e-6
    assert least <= factor <= most, (
        f"{side}: decoded normal values are {factor:.4f} times as long along the values; with an error of {error:.4f} "
        f"{least:.4f} to {most:.4f} are allowed: multiply in decode by what encode divides by, and round to nearest"
    )


@only(lambda side: bool(side.stochastic), "rounds stochastically")
def test_stochastic_rounding_is_unbiased(side: Quantizer) -> None:
    """The mean of many roundings is the value, within a twentieth of a step, and each seed gives bytes of its own."""
    x = normal(32, 64)
    rounded = torch.stack([encode(side, x, seed=seed).decode() for seed in range(SEEDS)])
    assert not torch.equal(rounded[0], rounded[1]), (
        f"{side}: seeds 0 and 1 give the same rounding; they must differ: take the random bits from "
        "bits.bytes(rows, cols) in encode_stochastic"
    )
    one, mean = relative_error(rounded[0], x), relative_error(rounded.mean(0), x)
    off = (rounded.mean(0) - x) / (rounded - x).square().mean().sqrt()
    for drift, where in ((off.mean(), "upward"), ((off * x.sign()).mean(), "away from zero")):
        assert abs(drift) <= 0.1, (
            f"{side}: the mean of {SEEDS} roundings lies {drift:+.3f} of the error of one rounding {where}; at most "
            "0.1 of it is chance: round up with the probability of the place between two neighbours"
        )
    assert mean <= 0.2 * one, (
        f"{side}: the mean of {SEEDS} roundings is off by {mean:.4f} and a single one by {one:.4f}; it must be below a "
        "fifth of that: round up with the probability of the place between two neighbours"
    )


@only(lambda side: side.unbiased, "says that it is unbiased")
def test_the_mean_of_many_roundings_is_the_matrix(side: Quantizer) -> None:
    """The mean of many roundings is off as the mean of independent errors is, and neither all elements nor the largest
    one of each block lose any magnitude: none is cut at the largest number of the format."""
    x = normal(64, 256)
    rounded = torch.stack([encode(side, x, seed=seed).decode() for seed in range(SEEDS)])
    mean, one = rounded.mean(0), (rounded - x).square().mean()
    chance = float((mean - x).square().mean() / (one / SEEDS))
    assert chance <= 1.1, (
        f"{side}: the mean of {SEEDS} roundings has {chance:.2f} times the error that independent roundings without a "
        "bias have; at most 1.1 is chance: leave room for scales that are rounded down, so that no element is cut"
    )
    places = {"all elements": torch.ones_like(x, dtype=torch.bool)}
    for buffer in side.layout:
        if buffer.block not in ((1, 1), (None, None)):
            largest = expand_blocks(block_amax(x, buffer.block), buffer.block, *x.shape)
            places[f"the largest element of each block of {buffer.name}"] = x.abs() == largest
    for where, mask in places.items():
        loss = 1 - float((mean * x.sign())[mask].sum() / x.abs()[mask].sum())
        assert abs(loss) <= 0.003, (
            f"{side}: in the mean {where} lost {loss:.4f} of the magnitude; at most 0.003 is chance: leave room for "
            "scales that are rounded down, so that no element is cut"
        )


@only(lambda side: bool(side.stochastic) and side.rotation is None, "rounds stochastically in its own basis")
def test_small_values_are_kept_on_average(side: Quantizer) -> None:
    """The mean of many roundings is the value for each magnitude by itself: small gradients beside a large one live on,
    down to a sixteenth of the least number that is represented beside it."""
    levels = _decoded(side, torch.logspace(-24, 0, PROBES, base=2), 1.0)
    least = float(levels[levels > 0].min())
    octaves = [least * 2.0**-n for n in range(4, 0, -1)]
    octaves += [least * 2.0**n for n in range(int(math.log2(1 / least)))]
    for sign, begin in itertools.product((1, -1), octaves):
        values = sign * begin * torch.linspace(1, 2, SMALL)
        rounded = _decoded(side, values, 1.0)
        off = abs(float((rounded.mean() - values.mean()) / values.mean()))
        assert off <= 0.15, (
            f"{side}: the mean of {SMALL} roundings of values from {begin:.3g} to {2 * begin:.3g}, times {sign} and "
            f"beside a value of 1, is off by {off:.2f} of it; at most 0.15 is chance: round up with the "
            "probability of the place between two neighbours, zero among them"
        )


@only(lambda side: bool(side.stochastic), "rounds stochastically")
def test_directions_draw_bits_of_their_own(side: Quantizer) -> None:
    """The rounding errors of the two operands are independent: a gradient is made of both. A pass draws
    signs once for both directions, which mix other elements by them."""
    x = normal(64, 64)
    row = encode(side, x, direction="row").decode() - x
    matrices = [(x.t(), "the transposed matrix")]
    if side.basis is None or not side.basis.drawn:
        matrices.append((x, "the same matrix"))
    for matrix, how in matrices:
        col = encode(side, matrix, direction="col").decode() - matrix
        col = col if matrix is x else col.t()
        alike = float((row * col).mean() / (row.square().mean() * col.square().mean()).sqrt())
        assert abs(alike) < 0.3, (
            f"{side}: the rounding errors of a row operand and of a column operand, {how}, correlate by {alike:.2f}; "
            "they must be independent: take the random bits from bits.bytes(rows, cols), which know the direction"
        )
