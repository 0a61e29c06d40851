"""The table of readings, and what they are compared with: a normal distribution in the same format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import torch

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.observe.sums import Reading, decibels, named, noise_order
from lpq.operations.decoding import decode
from lpq.operations.operands import encode_operands
from lpq.registry.errors import LpqError
from lpq.registry.tables import drawn

COLUMNS = ("layer", "tensor", "SNR dB", "normal", "to 0", "cut", "scale/0/grid", "shrinks", "amax/rms", "format")
SAMPLE = (128, 512)


@lru_cache(256)
def normal_snr(text: str, direction: Direction = "row") -> float | None:
    """The signal-to-noise ratio of a matrix of normally distributed numbers in this format, in dB. A column operand may
    be made of the row operand."""
    quantizer: Quantizer = registry.quantizer(text)
    x = torch.randn(SAMPLE, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        seed = torch.zeros((), dtype=torch.int64, device="cpu")
        operands = encode_operands(quantizer, x, row=direction == "row", col=direction == "col", seed=seed)
        operand = operands.row if direction == "row" else operands.col
        assert operand is not None
        error = decode(operand, torch.float32) - (x if direction == "row" else x.t())
    return decibels(float(x.square().sum()), float(error.square().sum()))


def table(readings: Sequence[Reading], most: int | None) -> str:
    """The table as text."""
    if not readings:
        return "no step was watched so far: steps are watched inside of `with watch.step():`"
    lines = readings if most is None else readings[:most]
    text = drawn(f"step {readings[0].step}, the most noise first", COLUMNS, map(cells, lines))
    return text + (f"\n{len(readings) - len(lines)} more with less noise" if len(lines) < len(readings) else "")


def cells(one: Reading) -> list[str]:
    """The cells of a reading."""
    normal = None
    if one.format and one.tensor != "dw":
        with suppress(LpqError):  # a report may be made without a plugin that the run had
            normal = normal_snr(one.format, one.direction or "row")
    parts = (one.error_scale, one.error_flushed, one.error_grid)
    shares = "/".join("–" if part is None else str(round(100 * part)) for part in parts)
    snr = _number(one.snr_db, "{:.1f}") if noise_order(one)[0] else "NaN"
    return [
        named(one.layer, one.recipe), one.operand, snr, _number(normal, "{:.1f}"),
        _number(one.flushed, "{:.2%}"), _number(one.saturated, "{:.2%}"), "" if one.error_grid is None else shares,
        _number(one.shrinkage, "{:+.2%}"), _number(one.amax_over_rms, "{:.1f}"), one.format,
    ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)
