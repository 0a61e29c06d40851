"""The statistics of a tensor, as a function of some of its rows and of what encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lpq.formats.format import Direction
from lpq.observe.gradients import pairs, signal_and_noise
from lpq.observe.operands import HowEncoded, encoded
from lpq.observe.sums import SUMS, sums_of, unit_of

SIDES: dict[bool, tuple[Direction, ...]] = {False: ("row", "col"), True: ("row",)}
"""The operands whose sums are taken, by whether the row operand is the column operand, too."""


class Question(NamedTuple):
    """The operands of a tensor, and the numbers that are asked for."""

    how: HowEncoded
    elements: int
    """How many elements the whole tensor has."""
    sums: bool
    pairs: bool
    """Whether the pairs of tokens of the column operand are asked for."""
    gradient: bool
    """Whether it is asked how noisy the gradient is to which they lead with the pairs of the layer's input."""

    def __str__(self) -> str:
        return ", ".join(f"{one.direction}={one.quantizer.text}" for one in self.how.sides)


class SumsAndPairs(NamedTuple):
    """The numbers of a tensor."""

    sums: Tensor
    """``SUMS`` of the row operand, of the column operand and, where it is asked for, of the gradient; 0 where there is
    none."""
    pairs: Tensor | None


def statistics(question: Question, tensors: Sequence[Tensor]) -> SumsAndPairs:
    """Return the statistics of a tensor. ``tensors``: where the gradient is asked for, the pairs of the layer's
    input; the tensors of ``SomeRows``."""
    rest = [*tensors]
    of_input = rest.pop(0) if question.gradient else None
    found = {one.direction: one for one in encoded(question.how, rest)}
    none, elements = tensors[0].new_zeros(len(SUMS), dtype=torch.float64), question.elements
    sums = [none, none]
    if question.sums:
        is_both, unit = any(side.is_both for side in question.how.sides), unit_of(rest[0])
        sums = [sums_of(found[side], elements, unit) if side in found else none for side in SIDES[is_both]]
        sums = [*sums, *sums] if is_both else sums
    own = pairs(found["col"]) if question.pairs else None
    if own is not None and of_input is not None:
        before, behind = SUMS.index("square"), len(SUMS) - SUMS.index("error") - 1
        sums.append(F.pad(signal_and_noise(of_input, own).double(), (before, behind)))
    return SumsAndPairs(torch.stack(sums), own)
