"""The two sides of a hybrid. Everything else belongs to a side, from which the core reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from lpq import registry
from lpq.core import Quantizer
from lpq.formats.format import Direction
from lpq.registry.errors import OptionError


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """A tensor whose two operands are encoded by different quantizers."""

    row: Quantizer
    """Its row side encodes the row operand."""
    col: Quantizer
    """Its column side encodes the column operand."""
    col_source: Literal["original", "row"] = "original"
    """The source of the column operand: the tensor itself, or the decoded row operand. If ``col`` is a hybrid with
    ``row``, so is this one."""

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        for side in ("row", "col"):
            if side not in options:
                raise OptionError(f"hybrid needs a quantizer for each side: add {side}=…, as in {side}=mxfp8")
            options[side] = registry.quantizer(options[side])
        if options["col"].col_source == "row":
            options["col_source"] = "row"
        return super().from_options(**options)

    def side(self, direction: Direction) -> Quantizer:
        return self.row.side("row") if direction == "row" else self.col.side("col")

    def frozen(self, search: str | None = None, *, static: bool = True) -> Quantizer:
        row, col = self.row.frozen(search, static=static), self.col
        if self.col_source == "original":  # else it has the statistics of the decoded row operand
            col = col.frozen(search, static=static)
        same = (row, col) == (self.row, self.col)
        return self if same else HybridQuantizer(row=row, col=col, col_source=self.col_source).ready()

    @property
    def transposable(self) -> bool:
        row, col = self.side("row"), self.side("col")
        return row == col and row.transposable and self.col_source == "original"

    def flipped(self) -> Quantizer | None:
        row, col = self.side("row"), self.side("col")
        if self.col_source == "row" or (col.side("row"), row.side("col")) != (col, row):
            return None
        return self if row == col else HybridQuantizer(row=col, col=row)
