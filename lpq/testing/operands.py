"""Functions of a format, called as the core calls them, and the matrices that the kit calls them with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from hypothesis import Phase, settings
from torch import Tensor

from lpq.formats import Quantizer, RandomBits, Storage
from lpq.formats.format import DIRECTIONS, Direction
from lpq.operations.format_calls import encoded_by
from lpq.operations.measuring import measure_reference
from lpq.recipes import Recipe, recipe

SEED = 1234
few = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
"""How much hypothesis tries: the same few shapes in every run. To trace what explains a failure would take many times
as long as to find it."""


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
    bits = None
    if side.stochastic:
        bits = RandomBits(torch.tensor(seed, device=x.device), DIRECTIONS.index(direction), offset)
    return encoded_by(side, x, stats, bits)


def unit(side: Quantizer, dim: int) -> int:
    """The rows (0) or columns (1) at which an operand can be cut: no buffer or statistic is cut apart."""
    steps = [b.unit(dim) for b in side.layout] + [s.block[dim] for s in side.stats]
    return math.lcm(*(step for step in steps if step is not None))


def no_parts(quantizer: Quantizer, dim: int, directions: Iterable[Direction] = DIRECTIONS) -> bool:
    """Whether a tensor that holds these operands must not be cut along its rows (0) or columns (1), at whole blocks
    either."""
    return any(quantizer.side(d).why_no_parts(dim if d == "row" else 1 - dim) is not None for d in directions)


def cut(quantizer: Quantizer) -> tuple[int, int]:
    """The rows and the columns, multiples of 8, at which a tensor with both operands can be cut."""
    row, col = quantizer.side("row"), quantizer.side("col")
    return math.lcm(8, unit(row, 0), unit(col, 1)), math.lcm(8, unit(row, 1), unit(col, 0))


def stored_bits(side: Quantizer) -> float:
    """Bits that one element of a large fp32 matrix takes in the buffers."""
    operand = side.storage.empty(side, (4096, 4096), torch.float32, torch.device("meta"))
    return 8 * operand.nbytes / 4096**2


def rotated(quantizer: Quantizer) -> bool:
    """Whether an operand is stored in a rotated basis, so that decoding it sums in fp32."""
    return any(side.rotation is not None for side in sides(quantizer))


def recipe_of(quantizer: Quantizer) -> Recipe:
    """This quantizer for all tensors. Where only one direction is rotated, the weight goes by the other."""
    row, col = quantizer.side("row"), quantizer.side("col")
    weight = quantizer if row.basis == col.basis else row
    return recipe({"x": quantizer, "w": weight, "dy": quantizer})
