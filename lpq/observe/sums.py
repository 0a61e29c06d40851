"""Sums over the elements of an operand, from which its statistics follow: they add up over passes and over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from lpq.observe.operands import EncodedRows

TensorName = Literal["x", "w", "dy", "dw"]
DirectionName = Literal["row", "col", ""]
SUMS = (
    "elements", "whole_elements", "saturated", "lost", "nonzero",
    "flushed_error", "square", "error", "decoded_square", "scale_error",
)  # fmt: skip
"""Names of the sums. ``lost`` has the elements that become 0, and ``flushed_error`` their squares. ``scale_error`` is
the error of the others less the error that they would have if scales were not rounded; it is NaN where the format does
not say what it would store then. So is ``saturated`` where it is not known."""
ITSELF = "the model itself"
"""The name of a layer that is the model."""
NEAR = 2.0**-20
"""The part of a value that the rounding of its scale in fp32 may cost: then it is not cut, as where it is the amax."""
LEAST = 2.0**-90
"""The least sum of squares of a tensor to which no square counts that vanishes in fp32."""
EXPONENT = 0x7F800000
"""The bits of an fp32 number that make a power of two."""


def unit_of(rows: Tensor) -> Tensor:
    """A power of two, in fp32: products of values in this unit neither overflow nor vanish."""
    amax: Tensor = torch.linalg.vector_norm(rows, math.inf, dtype=torch.float32)
    return (amax.view(torch.int32) & EXPONENT).view(torch.float32).clamp(2.0**-100, 2.0**100)


def sums_of(operand: EncodedRows, elements: int, unit: Tensor) -> Tensor:
    """Return the sums of an operand of a tensor with ``elements`` elements.

    The values, in this ``unit``, are written one matrix behind the other. Then one reduction counts, and one adds
    squares up, each row in fp32 and the rows in fp64: a reduction from fp32 to fp64 would copy all values first."""
    x, decoded, doubled, others = operand.x, operand.decoded, operand.doubled, _with_other_scales(operand)
    values = x.new_empty((5 + len(others), *x.shape))
    saturated, flushed, whole, error, stored, *other_errors = values
    gone = decoded == 0
    torch.sub(torch.div(decoded, unit, out=stored), torch.div(x, unit, out=whole), out=error)
    torch.where(gone, whole, values.new_zeros(()), out=flushed)
    if doubled is None:
        saturated.zero_()
    else:  # twice the element is stored as less than the element
        torch.gt(torch.sub(x, doubled, alpha=1 + NEAR).mul_(stored), 0, out=saturated)
    for one, other in zip(other_errors, others, strict=True):
        torch.addcdiv(whole, other, unit, value=-1, out=one)
    if others:
        values[5:].masked_fill_(gone if len(others) == 1 else others[1] == 0, 0.0)
    counts = torch.linalg.vector_norm(values[:3], 0, 2).sum(1, dtype=torch.float64)
    norms = torch.linalg.vector_norm(torch.linalg.vector_norm(values[1:], 2, 2), 2, 1, dtype=torch.float64)
    if doubled is None:
        counts[:1].fill_(math.nan)  # to assign a number copies it from the host
    elif operand.has_same_scales is not None:
        counts[:1].masked_fill_(~operand.has_same_scales, math.nan)
    # In one kernel: a list that is copied to a GPU waits for it.
    sizes = torch.linspace(x.numel(), elements, 2, dtype=torch.float64, device=x.device)
    return torch.cat([sizes, counts, *_with_error_of_scales(operand, norms.mul_(unit).square_())])


def _with_other_scales(operand: EncodedRows) -> list[Tensor]:
    """The values that the format would store if it rounded no scale, and, where it rounds elements with random bits,
    the values rounded to the nearest: the noise of random bits is the grid's and not the scale's. There are none where
    no scale is rounded, or the format does not say."""
    quantizer, stats = operand.quantizer, operand.stats
    exact = None if stats is None or not quantizer.rounds_scales else quantizer.unrounded(operand.x, stats)
    if exact is None:
        return []
    return [exact] if operand.nearest is None else [exact, operand.nearest()]


def _with_error_of_scales(operand: EncodedRows, squares: Tensor) -> list[Tensor]:
    """The sums of squares with ``scale_error`` behind them, in place of the sums of squares with other scales."""
    if len(squares) == 4:
        known = operand.stats is not None and not operand.quantizer.rounds_scales
        return [squares, squares.new_full((1,), 0.0 if known else math.nan)]
    flushed, whole, error, stored, exact, *nearest = squares.chunk(len(squares))
    return [flushed, whole, error, stored, (nearest[0] if nearest else error - flushed) - exact]


@dataclass(frozen=True)
class Reading:
    """Statistics of one operand in one step, over all its passes and over all ranks. A number that is not known, or not
    finite, is None."""

    step: int
    layer: str
    tensor: TensorName
    """``x``, ``w`` or ``dy``; ``dw``: the gradient of the weight, of which ``snr_db`` alone is known."""
    direction: DirectionName = ""
    """``row``, ``col``; empty for ``dw``."""
    format: str = ""
    recipe: str = ""
    """The other recipe that is asked about; empty: the layer's own."""
    snr_db: float | None = None
    """The signal over the error, in decibels; None where there is no error, too."""
    flushed: float | None = None
    """The fraction of the elements other than 0 that become 0."""
    saturated: float | None = None
    """The fraction of the elements that are larger than the largest value that their scale lets the format have. None
    where twice the tensor would have other scales, as they follow from elements and not from statistics alone."""
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
        return named(f"{self.layer or ITSELF}.{self.operand}", self.recipe)

    def numbers(self) -> dict[str, float]:
        """The numbers that are known, by their names."""
        return {name: value for name, value in vars(self).items() if isinstance(value, float)}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without what is not known."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def named(layer: str, recipe: str) -> str:
    """The name of a layer for people to read, with the other recipe that is asked about."""
    return (layer or ITSELF) + (f" if {recipe}" if recipe else "")


def decibels(signal: float, noise: float) -> float | None:
    """The ratio in dB, if it is a finite number."""
    finite = signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)
    return 10 * math.log10(signal / noise) if finite else None


def reading_of(sums: Mapping[str, float], amax: float, **where: Any) -> Reading:
    """The statistics that follow from the sums of an operand, from ``whole_square``, the sum of squares of the whole
    tensor, and from its largest magnitude. Where squares leave the range of fp32, the rows that were looked at, which
    have a unit, give the mean square."""
    error, square, elements = sums["error"], sums["square"], sums["elements"]
    whole = error if elements else 0.0
    split = elements > 0 and not math.isnan(sums["scale_error"])
    parts = [sums["scale_error"] if split else 0.0, sums["flushed_error"]]
    mean = _ratio(sums["whole_square"], sums["whole_elements"])
    if mean is None or sums["whole_square"] < LEAST:
        mean = _ratio(square, elements) or mean
    return Reading(
        **where,
        snr_db=decibels(square, error),
        flushed=_ratio(sums["lost"], sums["nonzero"]),
        saturated=_ratio(sums["saturated"], elements),
        error_scale=_ratio(parts[0], whole) if split else None,
        error_flushed=_ratio(parts[1], whole),
        error_grid=_ratio(error - sum(parts), whole),
        shrinkage=_ratio((sums["decoded_square"] - square - error) / 2, square if elements else 0.0) if error else 0.0,
        amax=amax if elements and math.isfinite(amax) else None,
        amax_over_rms=_ratio(amax, math.sqrt(mean or 0.0)),
    )


def noise_order(reading: Reading) -> tuple[int, float]:
    """The key that sorts readings by their noise, the most first. Readings without an SNR are first if they have a
    NaN, and last if they have no error, or are of zeros alone."""
    if reading.snr_db is not None:
        return 1, reading.snr_db
    return (2, 0.0) if reading.shrinkage is not None or reading.amax == 0 else (0, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(part) and math.isfinite(whole) else None
