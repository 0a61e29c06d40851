"""The matrices that a format is tried on: one pairwise table of what mistakes depend on, for all tests.

Every two values of two factors meet in some row: dtype, magnitude, where an outlier lies, how many rows and columns are
left beside whole blocks, how the matrix lies in memory, and torch's default dtype. Three rows more are of sizes that
matter by themselves: a large matrix, its transpose, and a square of whole tiles.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lpq.formats import Quantizer, Storage
from lpq.testing.operands import normal, unit

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE, TALL, SQUARE = (601, 1103), (65_601, 9), 256
"""A matrix of more than 2^19 elements, whose rows and columns nothing divides; one of more rows than a GPU's grid has
blocks along its second dimension; and the side of a square, at least."""


def least(dtype: torch.dtype) -> float:
    """The least number of a dtype above zero."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


MAGNITUDES: dict[str, Callable[[torch.dtype], float]] = {
    "one": lambda dtype: 1.0,
    "1e-5": lambda dtype: 1e-5,
    "the least normal number": lambda dtype: 4 * torch.finfo(dtype).smallest_normal,
    "the least number": lambda dtype: 4 * least(dtype),
    "the largest number": lambda dtype: torch.finfo(dtype).max / 8,
}
"""The factor of normal values."""
PLACES: dict[str, tuple[int, int] | None] = {
    "no outlier": None,
    "an outlier in the first row and column": (0, 0),
    "an outlier in the first row and last column": (0, -1),
    "an outlier in the last row and first column": (-1, 0),
    "an outlier in the last row and column": (-1, -1),
    "an outlier in the last row": (-1, 1),
    "an outlier in the last column": (1, -1),
}
OUTLIER = 16
"""The factor of the largest value; an outlier among the largest numbers is the largest number of all."""
RESTS = {"whole blocks": (2, 0), "one more": (1, 1), "one less": (2, -1)}
"""How many blocks a dimension has, and how many rows or columns more."""
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "inside of rows that are longer": lambda x: torch.nn.functional.pad(x, (3, 2))[:, 3:-2],
    "every other row and column": lambda x: x.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "behind another number": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "one row, expanded": lambda x: x[:1].expand(x.shape),
    "one column, expanded": lambda x: x[:, :1].expand(x.shape),
    "one number, expanded": lambda x: x[:1, :1].expand(x.shape),
}
"""Ways to repeat a part of a matrix without a copy, as gradients of sums do."""
DEFAULTS = {"": torch.float32, "torch's default dtype bf16": torch.bfloat16}
FACTORS: Mapping[str, Sequence[Any]] = {
    "magnitude": tuple(MAGNITUDES),
    "place": tuple(PLACES),
    "laid": tuple(LAID),
    "dtype": DTYPES,
    "rows": tuple(RESTS),
    "cols": tuple(RESTS),
    "default": tuple(DEFAULTS),
}
OTHERS = ("laid", "dtype", "default")
"""The factors of a matrix whose size matters by itself."""


@dataclass(frozen=True)
class Case:
    """One row of the table, for a format of certain blocks."""

    shape: tuple[int, int]
    dtype: torch.dtype
    magnitude: str
    place: str
    laid: str
    default: str

    def __str__(self) -> str:
        parts = [f"a matrix {list(self.shape)} in {self.dtype}", f"values near {self.magnitude}", self.place, self.laid]
        return ", ".join([*parts, self.default] if self.default else parts)

    @property
    def outlier(self) -> tuple[int, int] | None:
        """The row and the column of the outlier."""
        at = PLACES[self.place]
        return None if at is None else (min(at[0], self.shape[0] - 1), min(at[1], self.shape[1] - 1))

    def matrix(self, seed: int = 0) -> Tensor:
        """The matrix, row-major and from the first byte of its memory on."""
        return _matrix(self, seed).clone()

    @contextlib.contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Torch's default dtype is the dtype of this case."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(DEFAULTS[self.default])
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def cases(side: Quantizer, magnitudes: Sequence[str] = tuple(MAGNITUDES)) -> tuple[Case, ...]:
    """The rows of the table, for operands of a quantizer and for these magnitudes; the largest matrices come last."""
    return _cases(unit(side, 0), unit(side, 1), tuple(magnitudes))


def in_views(operand: Storage) -> Storage:
    """The operand, whose buffers that are matrices are transposed views."""
    return operand.map(lambda buffer: buffer.clone() if buffer.dim() != 2 else LAID["transposed"](buffer))


def tall() -> Case:
    """A matrix of many rows, which is tried where it takes few calls."""
    return Case(TALL, torch.bfloat16, "one", "no outlier", "contiguous", "")


@cache
def _cases(rows: int, cols: int, magnitudes: tuple[str, ...]) -> tuple[Case, ...]:
    blocks = max(rows, 8), max(cols, 8)
    table = []
    for row in _pairwise({**FACTORS, "magnitude": magnitudes}):
        (rows, more_rows), (cols, more_cols) = RESTS[row.pop("rows")], RESTS[row.pop("cols")]
        table.append(Case(shape=(rows * blocks[0] + more_rows, cols * blocks[1] + more_cols), **row))
    step = max(blocks)
    square = -(-SQUARE // step) * step
    for i, shape in enumerate(((square, square), LARGE, LARGE[::-1])):
        others = {name: values[(i + 1) % len(values)] for name, values in FACTORS.items() if name in OTHERS}
        table.append(Case(shape=shape, magnitude="one", place="no outlier", **others))
    return tuple(table)


def _pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every two values of two factors meet; the first row has the first value of each."""
    names = list(factors)
    pairs = {
        ((a, one), (b, other))
        for a, b in itertools.combinations(names, 2)
        for one in range(len(factors[a]))
        for other in range(len(factors[b]))
    }
    rows: list[dict[str, int]] = []
    while pairs:
        row: dict[str, int] = {} if rows else dict.fromkeys(names, 0)
        for name in names:
            if name not in row:
                row[name] = max(range(len(factors[name])), key=partial(_gain, pairs, row, name))
        pairs -= set(itertools.combinations(row.items(), 2))
        rows.append(row)
    return [{name: factors[name][value] for name, value in row.items()} for row in rows]


def _gain(pairs: set[Any], row: Mapping[str, int], name: str, value: int) -> tuple[int, int]:
    """How many pairs a value of a factor adds to a row, and how many it may add yet."""
    gain = sum(((other, choice), (name, value)) in pairs for other, choice in row.items())
    return gain, sum((name, value) in pair for pair in pairs)


@cache
def _matrix(case: Case, seed: int) -> Tensor:
    top, bottom = torch.finfo(case.dtype).max, least(case.dtype)
    x = normal(*case.shape, torch.float64, seed) * MAGNITUDES[case.magnitude](case.dtype)
    if case.outlier is not None:
        x[case.outlier] = (OUTLIER * x.abs().max()).copysign(x[case.outlier])
    if case.magnitude == "the least number":  # whole multiples of it, as rounding to the dtype may lose
        x = (x / bottom).round() * bottom
    return x.clamp(-top, top).to(case.dtype)
