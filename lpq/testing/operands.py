"""What a format wrote, called as the core calls it, and the matrices that the kit calls it with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lpq.core import Quantizer, RandomBits, Storage
from lpq.core.operations import measure_reference
from lpq.core.quantizer import Direction
from lpq.recipes import Recipe, recipe

SEED = 1234
DIRECTIONS: tuple[Direction, Direction] = ("row", "col")


def sides(quantizer: Quantizer) -> list[Quantizer]:
    """The quantizers of the two operands; one, if it serves both."""
    row, col = quantizer.side("row"), quantizer.side("col")
    return [row] if row == col else [row, col]


def normal(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed values."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def measure(side: Quantizer, x: Tensor) -> dict[str, Tensor]:
    """The statistics of one operand, by name."""
    return dict(zip((s.name for s in side.stats), measure_reference(x, side, None), strict=True))


def encode(
    side: Quantizer,
    x: Tensor,
    stats: Mapping[str, Tensor] | None = None,
    *,
    direction: Direction = "row",
    offset: tuple[int, int] = (0, 0),
    seed: int = SEED,
) -> Storage:
    """One operand, as the format's ``encode`` (or ``encode_stochastic``) returns it."""
    stats = measure(side, x) if stats is None else stats
    if side.stochastic:
        bits = RandomBits(torch.tensor(seed), DIRECTIONS.index(direction), offset)
        storage = side.encode_stochastic(x, stats, bits)
    else:
        storage = side.encode(x, stats)
    return storage.bind(side, (x.shape[0], x.shape[1]), x.dtype)


def unit(side: Quantizer, dim: int) -> int:
    """The number of rows (0) or columns (1) that the operand can be cut at: it cuts no block of a buffer or statistic."""
    steps = [b.unit(dim) for b in side.storage.layout_for(side)] + [s.block[dim] for s in side.stats]
    return math.lcm(*(step for step in steps if step is not None))


def cut(quantizer: Quantizer) -> tuple[int, int]:
    """The smallest number of rows and of columns, a multiple of 8, at which a tensor can be cut in both directions."""
    row, col = quantizer.side("row"), quantizer.side("col")
    return math.lcm(8, unit(row, 0), unit(col, 1)), math.lcm(8, unit(row, 1), unit(col, 0))


def rotated(quantizer: Quantizer) -> bool:
    """Whether an operand is stored in a rotated basis, so that decoding it sums in fp32."""
    return any(side.rotation is not None for side in sides(quantizer))


def stochastic(quantizer: Quantizer) -> bool:
    return any(side.stochastic for side in sides(quantizer))


def recipe_of(quantizer: Quantizer) -> Recipe:
    """This quantizer for every operand that it can serve: the weight's never rotate where only one direction does."""
    row, col = quantizer.side("row"), quantizer.side("col")
    weight = quantizer if row.rotation == col.rotation else row
    return recipe({"x": quantizer, "w": weight, "dy": quantizer})
