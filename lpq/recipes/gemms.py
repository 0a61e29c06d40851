"""Recipe: which quantizer each operand of a linear layer's three products gets.

    fprop  y = x.row · w.row        dgrad  dx = dy.row · w.col        wgrad  dw = dy.col · x.col

A quantizer speaks of a whole tensor, so an operand is one side of its quantizer, and the two operands of a
tensor make one quantizer again: a layer encodes with ``recipe.x``, ``recipe.w`` and ``recipe.dy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.recipes.errors import RecipeError, place
from lpq.registry.showing import brief, preformatted
from lpq.registry.toml import text_of


class GemmOperand(NamedTuple):
    """One operand of one product."""

    gemm: str
    tensor: str
    side: Direction

    def __str__(self) -> str:
        return f"{self.gemm}.{self.tensor}"

    def belongs_to(self, key: str) -> bool:
        """Whether a key of a recipe covers this operand: ``wgrad``, ``dy`` and ``wgrad.dy`` cover ``wgrad.dy``."""
        return key in (self.gemm, self.tensor, str(self))


GEMMS = ("fprop", "dgrad", "wgrad")
TENSORS = ("x", "w", "dy")
OPERANDS = (
    GemmOperand("fprop", "x", "row"),
    GemmOperand("fprop", "w", "row"),
    GemmOperand("dgrad", "dy", "row"),
    GemmOperand("dgrad", "w", "col"),
    GemmOperand("wgrad", "dy", "col"),
    GemmOperand("wgrad", "x", "col"),
)
"""The operands in the order in which the products multiply them. The row operand of a tensor comes first."""
SAVES = {"x": ("encoded", "input"), "w": ("encoded", "weight")}
"""The choices of what a layer keeps of a tensor for backward: the operand that backward multiplies, which is the
default, or the tensor itself, from which backward makes the operand."""


@dataclass(frozen=True)
class Gemm:
    """One product: the quantizers of its operands, in the order of ``OPERANDS``, and how it sums."""

    a: Quantizer
    b: Quantizer
    fast_accumulate: bool | None = None
    """Whether products may be summed in less than fp32 where the hardware offers it; None: in fprop only."""

    def __post_init__(self) -> None:
        for quantizer in (self.a, self.b):
            if not isinstance(quantizer, Quantizer):
                raise RecipeError(
                    f"an operand of a Gemm must be a quantizer, not {brief(quantizer)}: lpq.quantizer makes one"
                )
        if not isinstance(self.fast_accumulate, bool | None):
            raise RecipeError(f"fast_accumulate must be true or false, not {brief(self.fast_accumulate)}")


@dataclass(frozen=True, repr=False)
class Recipe:
    """The three products. Recipes with the same products are equal; ``name`` is a label only."""

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    name: str | None = field(default=None, compare=False)
    save_x: str = "encoded"
    """The choice for the input, one of ``SAVES``."""
    save_w: str = "encoded"
    """The choice for a weight that is not stored or gathered quantized."""

    def __post_init__(self) -> None:
        for name in GEMMS:
            if not isinstance(gemm := self.gemm(name), Gemm):
                raise RecipeError(f"{name} must be a Gemm, not {brief(gemm)}: lpq.recipe takes strings")
        if not isinstance(self.name, str | None):
            raise RecipeError(f"name must be a string, not {brief(self.name)}")
        for key, value in self.saves.items():
            with place(f"{key}.save"):
                check_save(key, value)
        for name, product in self.products.items():
            _check_bases(name, product)
        for tensor in TENSORS:  # sides that cannot be joined are found now, not in a layer
            with place(tensor):
                getattr(self, tensor)

    def gemm(self, name: str) -> Gemm:
        """The product with this name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[name]

    @property
    def saves(self) -> Mapping[str, str]:
        """The choices of what is kept for backward, by the keys of ``SAVES``."""
        return {"x": self.save_x, "w": self.save_w}

    @cached_property
    def operands(self) -> Mapping[GemmOperand, Quantizer]:
        """The quantizer of each operand, as given: the operand is its side ``GemmOperand.side``."""
        quantizers = (q for gemm in (self.fprop, self.dgrad, self.wgrad) for q in (gemm.a, gemm.b))
        return dict(zip(OPERANDS, quantizers, strict=True))

    @cached_property
    def products(self) -> Mapping[str, tuple[Quantizer, Quantizer]]:
        """The quantizers of the two operands of each product: the sides that encode these operands."""
        sides = {operand: quantizer.side(operand.side) for operand, quantizer in self.operands.items()}
        return {a.gemm: (sides[a], sides[b]) for a, b in zip(OPERANDS[::2], OPERANDS[1::2], strict=True)}

    @cached_property
    def x(self) -> Quantizer:
        """The quantizer of the layer's input: its row operand for fprop, its column operand for wgrad."""
        return self._joined("x")

    @cached_property
    def w(self) -> Quantizer:
        """The quantizer of the weight: its row operand for fprop, its column operand for dgrad."""
        return self._joined("w")

    @cached_property
    def dy(self) -> Quantizer:
        """The quantizer of the output's gradient: its row operand for dgrad, its column operand for wgrad."""
        return self._joined("dy")

    def _joined(self, tensor: str) -> Quantizer:
        """The row side of one quantizer and the column side of another, as one."""
        row, col = (q for operand, q in self.operands.items() if operand.tensor == tensor)
        if row.side("row") == col.side("row"):
            return col
        if row.side("col") == col.side("col") and row.col_source == col.col_source:
            return row
        sides = {"row": row.side("row"), "col": col.side("col")}
        joined: Quantizer = registry.quantizer("hybrid", **sides, col_source=col.col_source)
        return joined

    @property
    def title(self) -> str:
        """The name of the recipe, or else its text."""
        return self.name or self.text

    @cached_property
    def text(self) -> str:
        """A short text that ``lpq.recipe`` makes this recipe from, whatever recipes are installed."""
        sums = {f"{gemm}.fast_accumulate": self.gemm(gemm).fast_accumulate for gemm in GEMMS}
        others = {key: str(fast).lower() for key, fast in sums.items() if fast is not None}
        others |= {f"{key}.save": value for key, value in self.saves.items() if value != SAVES[key][0]}
        if len(set(self.operands.values())) == 1 and not others:
            return explicit(self.fprop.a)
        ways = [[part for key in keys for part in self._parts(key)] for keys in (GEMMS, TENSORS)]
        shortest = min(ways, key=len)
        return ", ".join(f"{key}={value}" for key, value in [*shortest, *others.items()])

    def _parts(self, key: str) -> list[tuple[str, str]]:
        """A product or tensor as items of the grammar: one item, if its two operands have the same quantizer."""
        parts = [(str(o), explicit(q)) for o, q in self.operands.items() if o.belongs_to(key)]
        return [(key, parts[0][1])] if parts[0][1] == parts[1][1] else parts

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``lpq.recipe`` makes this recipe: strings, booleans and dicts of them."""
        table: dict[str, Any] = {"name": self.name} if self.name is not None else {}
        for gemm in GEMMS:
            table[gemm] = {o.tensor: explicit(q) for o, q in self.operands.items() if o.gemm == gemm}
            if (fast := self.gemm(gemm).fast_accumulate) is not None:
                table[gemm]["fast_accumulate"] = fast
        table |= {key: {"save": value} for key, value in self.saves.items() if value != SAVES[key][0]}
        return table

    def to_toml(self) -> str:
        """The text of a TOML file that ``lpq.recipe`` makes this recipe from."""
        return text_of(self.to_dict())

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"lpq.recipe({self.text!r})"

    def _repr_html_(self) -> str:
        return preformatted(self.to_toml())

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def check_save(key: str, value: object) -> None:
    """Refuse to keep something else of a tensor for backward."""
    if value not in SAVES[key]:
        raise RecipeError(f"it must be {' or '.join(map(repr, SAVES[key]))}, not {brief(value)}")


def explicit(quantizer: Quantizer) -> str:
    """The text of a quantizer in a recipe: with parentheses, since a bare name is a recipe's."""
    return quantizer.text if quantizer.text.endswith(")") else f"{quantizer.text}()"


def _check_bases(gemm: str, product: tuple[Quantizer, Quantizer]) -> None:
    """Refuse to multiply a rotated matrix by one that is not rotated alike: only equal rotations cancel."""
    if product[0].basis == product[1].basis:
        return
    a, b = (operand for operand in OPERANDS if operand.gemm == gemm)
    first, second = (
        f"{o.tensor}.{o.side} = {q} is {f'rotated by {q.basis}' if q.basis else 'not rotated'}"
        for o, q in zip((a, b), product, strict=True)
    )
    raise RecipeError(
        f"{gemm} cannot multiply its operands: {first}, {second}. "
        f"Give both the same rotation or neither, by another quantizer for {a} or {b}."
    )
