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
    "elements", "whole_elements", "nonzero", "kept", "saturated",
    "square", "error", "flushed_error", "decoded_square", "nearest_error", "unrounded_error",
)  # fmt: skip
"""Names of the sums. ``kept`` has the elements that do not become 0. ``nearest_error`` and ``unrounded_error`` are of
kept elements, with scales as they are and as they would be if they were not rounded; both are NaN where the format does
not say what it would store then. So is ``saturated`` where it is not known."""


def sums_of(operand: EncodedRows, elements: int) -> Tensor:
    """Return the sums of an operand of a tensor that has so many ``elements``."""
    x, decoded, doubled = operand.x, operand.decoded, operand.doubled
    kept = x.masked_fill(decoded == 0, 0.0)
    saturated = x.new_full((), math.nan, dtype=torch.float64)
    if doubled is not None:
        saturated = ((doubled == decoded) & (decoded.abs() < kept.abs())).sum(dtype=torch.float64)
    sizes = [x.new_full((), size, dtype=torch.float64) for size in (x.numel(), elements)]
    counts = [*sizes, _norm(x, 0), _norm(kept, 0), saturated]
    norms = [_norm(x), _norm(decoded - x), _norm(x - kept), _norm(decoded), *_by_scales(operand)]
    return torch.cat([torch.stack(counts), torch.stack(norms).square()])


def _norm(x: Tensor, order: int = 2) -> Tensor:
    """The root of the sum of squares; of order 0 the number of elements other than 0."""
    norm: Tensor = torch.linalg.vector_norm(x, order, dtype=torch.float64)
    return norm


def _by_scales(operand: EncodedRows) -> tuple[Tensor, Tensor]:
    """The norms of the error of kept elements, with scales as they are and as they would be if they were not
    rounded."""
    quantizer, x, stats = operand.quantizer, operand.x, operand.stats
    if stats is not None and not quantizer.rounds_scales:
        return (x.new_zeros((), dtype=torch.float64),) * 2  # the same, whatever it is
    exact = None if stats is None else quantizer.unrounded(x, stats)
    if stats is None or exact is None:
        return (x.new_full((), math.nan, dtype=torch.float64),) * 2
    nearest = operand.decoded
    if quantizer.stochastic:  # the noise of random bits is the grid's and not the scale's
        shape = x.shape[0], x.shape[1]
        nearest = quantizer.encode(x, stats).bind(quantizer, shape, x.dtype).decode_rotated()
    gone = nearest == 0
    return _norm((nearest - x).masked_fill(gone, 0.0)), _norm((exact - x).masked_fill(gone, 0.0))


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
    """The statistics that follow from the sums of an operand, and from ``whole_square``, the sum of squares of the
    whole tensor, and its largest magnitude."""
    error, square, elements = sums["error"], sums["square"], sums["elements"]
    whole = error if elements else 0.0
    scale = sums["nearest_error"] - sums["unrounded_error"]
    split = elements > 0 and not math.isnan(scale)
    parts = [scale if split else 0.0, sums["flushed_error"]]
    rms = math.sqrt(_ratio(sums["whole_square"], sums["whole_elements"]) or 0.0)
    return Reading(
        **where,
        snr_db=decibels(square, error),
        flushed=_ratio(sums["nonzero"] - sums["kept"], sums["nonzero"]),
        saturated=_ratio(sums["saturated"], elements),
        error_scale=_ratio(parts[0], whole) if split else None,
        error_flushed=_ratio(parts[1], whole),
        error_grid=_ratio(error - sum(parts), whole),
        shrinkage=_ratio((sums["decoded_square"] - square - error) / 2, square if elements else 0.0),
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
