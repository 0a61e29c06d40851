"""Multiplicands: operands that are multiplied in bf16 at once and not kept, so that only their exact form is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage


class Form(NamedTuple):
    """The properties that the exact forms of all operands of a format share."""

    factor: bool = False
    """Whether there is a factor for the whole matrix."""
    constant: float = 1.0
    """As ``Exact.constant``."""


class Exact(NamedTuple):
    """``matrix · factor · constant``: what an operand stands for, in the basis in which it is stored."""

    matrix: Tensor
    """In bf16, and contiguous."""
    factor: Tensor | None = None
    """In fp32: one for the matrix, 0-dimensional, or one for each row, ``[rows, 1]``; None: there is none."""
    constant: float = 1.0
    """A part of the factor that is the same for all operands of the format; 1 if there is none."""
    rest: Tensor | None = None
    """In fp32: the last columns, fewer than a block of the rotation, decoded and not rotated; None: there are none.
    They have no factor."""


class BoundExact(NamedTuple):
    """A function that makes exact forms of one kind, without ``rest``."""

    form: Form
    make: Callable[[Sequence[Tensor]], Exact]
    """Makes the exact form of an operand from its buffers."""


ToExact = Callable[[Sequence[Tensor]], Exact | None]
"""Makes the exact form of an operand from its buffers, of any kind, or none."""


class Multiplicand(Storage):
    """An operand that exists in its exact form only."""

    form: Exact

    @classmethod
    def from_matrix(
        cls, tensors: Sequence[Tensor], constant: float, quantizer: Quantizer, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Self:  # fmt: skip
        """The operand over its matrix and, if it has one, its factor."""
        operand = cls().bind(quantizer, shape, dtype)
        operand.form = Exact(tensors[0], tensors[1] if len(tensors) > 1 else None, constant)
        return operand

    @property
    def text(self) -> str:
        return f"{self.form.constant!r}|{self.quantizer.text}"

    def tensors(self) -> list[Tensor]:
        return [self.form.matrix] if self.form.factor is None else [self.form.matrix, self.form.factor]

    def decode_rotated(self) -> Tensor:
        decoded = self.form.matrix.float() * self.form.constant
        return decoded if self.form.factor is None else decoded * self.form.factor


def form_of(text: str, count: int) -> tuple[Form | None, str]:
    """The exact form that a ``Storage.text`` of ``count`` tensors describes, None if it is encoded; and the
    quantizer."""
    constant, _, name = text.rpartition("|")
    return Form(count > 1, float(constant)) if constant else None, name
