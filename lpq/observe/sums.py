"""Sums over the elements of an operand, from which its statistics follow: they add up over passes and over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpq.observe.operands import EncodedRows

SUMS = (
    "elements", "nonzero", "flushed", "saturated", "known_saturated", "square", "error", "product", "flushed_error",
    "scale_error", "split", "whole_elements", "whole_square",
)  # fmt: skip
"""Names of the sums. ``split`` counts the elements of operands whose format says what it would store if it rounded no
scale, and ``known_saturated`` the elements of which it is known whether they are saturated."""


def sums_of(operand: EncodedRows, whole: tuple[Tensor, int]) -> Tensor:
    """Return the sums of an operand. ``whole``: the sum of squares of the whole tensor, and the number of its
    elements."""
    x, decoded, doubled = operand.x, operand.decoded, operand.doubled
    zero = x.new_zeros((), dtype=torch.float64)
    squares, error = x * x, (decoded - x).square()
    gone = (decoded == 0) & (x != 0)
    saturated = known_elements = split = scale = zero
    if doubled is not None:
        known_elements = zero + x.numel()
        saturated = ((doubled == decoded) & (decoded != 0) & (decoded.abs() < x.abs())).sum()
    if operand.stats is not None and (exact := operand.quantizer.unrounded(x, operand.stats)) is not None:
        nearest, flushed = _nearest(operand, error, gone)
        split, scale = zero + x.numel(), torch.where(flushed, 0.0, nearest - (exact - x).square()).sum()
    sums = (
        zero + x.numel(), torch.count_nonzero(x), gone.sum(), saturated, known_elements, squares.sum(), error.sum(),
        (decoded * x).sum(), torch.where(gone, squares, 0.0).sum(), scale, split, zero + whole[1], whole[0],
    )  # fmt: skip
    return torch.stack([one.double() for one in sums])


def _nearest(operand: EncodedRows, error: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of the errors, and what is flushed, where a format rounds to the nearest in place of by random bits:
    the noise of these bits is the grid's and not the scale's."""
    quantizer, x = operand.quantizer, operand.x
    if not quantizer.stochastic:
        return error, gone
    assert operand.stats is not None
    rows, cols = x.shape
    operand_to_nearest = quantizer.encode(x, operand.stats).bind(quantizer, (rows, cols), x.dtype)
    values = operand_to_nearest.decode_rotated()
    return (values - x).square(), (values == 0) & (x != 0)


@dataclass(frozen=True)
class Reading:
    """Statistics of one operand in one step, over all its passes and over all ranks. A number that is not known, or not
    finite, is None."""

    step: int
    layer: str
    tensor: str
    """``x``, ``w`` or ``dy``; ``dw``: the gradient of the weight, of which ``snr_db`` alone is known."""
    direction: str = ""
    """``row``, ``col``; empty for ``dw``."""
    format: str = ""
    recipe: str = ""
    """The other recipe that is asked about; empty: the layer's own."""
    snr_db: float | None = None
    """The signal over the error, in decibels; None where there is no error, too."""
    flushed: float | None = None
    """The fraction of the elements other than 0 that become 0."""
    saturated: float | None = None
    """The fraction of the elements that are larger than the largest value that their scale lets the format have."""
    error_scale: float | None = None
    """The part of the error's energy that comes from rounding scales. It is below 0 where they happen to fit better
    than if they were not rounded, or were searched for. The three parts add up to 1."""
    error_flushed: float | None = None
    """The part that comes from elements that become 0."""
    error_grid: float | None = None
    """The part that comes from rounding elements; where ``error_scale`` is None, the part of scales is in it."""
    shrinkage: float | None = None
    """How much longer (above 0) or shorter the decoded matrix is along the matrix: ⟨dq(x), x⟩/⟨x, x⟩ - 1."""
    amax: float | None = None
    """The largest magnitude of the whole tensor."""
    amax_over_rms: float | None = None

    @property
    def operand(self) -> str:
        """The tensor and its direction: ``x.row``."""
        return f"{self.tensor}.{self.direction}" if self.direction else self.tensor

    @property
    def title(self) -> str:
        """The layer and the operand, and the other recipe that is asked about."""
        return f"{self.layer}.{self.operand}" + (f" if {self.recipe}" if self.recipe else "")

    def numbers(self) -> dict[str, float]:
        """The numbers that are known, by their names."""
        return {name: value for name, value in vars(self).items() if isinstance(value, float)}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without what is not known."""
        return {name: value for name, value in vars(self).items() if value is not None and value != ""}


def decibels(signal: float, noise: float) -> float | None:
    """The ratio in dB, if it is a finite number."""
    finite = signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)
    return 10 * math.log10(signal / noise) if finite else None


def reading_of(sums: Mapping[str, float], amax: float, **where: Any) -> Reading:
    """The statistics that follow from the sums of an operand."""
    error, square, elements = sums["error"], sums["square"], sums["elements"]
    split = elements > 0 and sums["split"] == elements
    parts = [sums["scale_error"] if split else 0.0, sums["flushed_error"]]
    whole = error if elements else 0.0
    rms = math.sqrt(_ratio(sums["whole_square"], sums["whole_elements"]) or 0.0)
    projected = _ratio(sums["product"], square if elements else 0.0)
    return Reading(
        **where,
        snr_db=decibels(square, error),
        flushed=_ratio(sums["flushed"], sums["nonzero"]),
        saturated=_ratio(sums["saturated"], elements) if sums["known_saturated"] == elements else None,
        error_scale=_ratio(parts[0], whole) if split else None,
        error_flushed=_ratio(parts[1], whole),
        error_grid=_ratio(error - sum(parts), whole),
        shrinkage=None if projected is None else projected - 1,
        amax=amax if elements and math.isfinite(amax) else None,
        amax_over_rms=_ratio(amax, rms),
    )


def noise_order(reading: Reading) -> tuple[int, float]:
    """The key that sorts readings by their noise, the most first. Among readings without an SNR those with a NaN
    come first, and the ones without an error, or of zeros alone, last."""
    if reading.snr_db is not None:
        return 1, reading.snr_db
    return (2, 0.0) if reading.shrinkage is not None or reading.amax == 0 else (0, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(part) and math.isfinite(whole) else None
