"""The two operands of a tensor: the statistics that they need, and the kernel that serves both."""

from __future__ import annotations

from typing import cast

import torch

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.layout import Stat
from lpq.kernels import Choice, KernelError, choose


def quantizer_of(text: str) -> Quantizer | None:
    return cast("Quantizer", registry.quantizer(text)) if text else None


def text_of(side: Quantizer | None) -> str:
    return side.text if side is not None else ""


def shared(row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether the column operand follows from the row operand."""
    return row is not None and (row is col or row == col) and row.transposable


def measured(row: Quantizer | None, col: Quantizer | None) -> list[tuple[Quantizer, int]]:
    """The sides that have statistics of their own, in order, and which of their dimensions is the tensor's first."""
    sides = [(side, dim) for dim, side in enumerate((row, col)) if side is not None]
    return sides[:1] if shared(row, col) else sides


def declared(row: Quantizer | None, col: Quantizer | None) -> list[tuple[Stat, int]]:
    """The statistics that these operands need, in order, and which of their dimensions is the tensor's first."""
    return [(stat, dim) for side, dim in measured(row, col) for stat in side.stats]


def draws(*sides: Quantizer | None) -> bool:
    """Whether one of these operands is rounded with random bits."""
    return any(side is not None and side.stochastic for side in sides)


def measures_again(row: Quantizer | None, col: Quantizer | None) -> bool:
    """Whether these operands need statistics of a second round."""
    return any(stat.round == 2 for side in (row, col) if side is not None for stat in side.stats)


def serving(op: str, row: Quantizer | None, col: Quantizer | None, device: torch.device) -> Choice | None:
    """The kernel choice that serves these operands together; None if each has a choice of its own. Each has its own
    where no kernel takes two operands that share nothing.
    """
    if row is None or col is None:
        side = row or col
        return choose(op, (side.text,) if side is not None else (), device)
    try:
        choice = choose(op, (row.text, col.text), device)
    except KernelError:  # the reference is not allowed: each operand by itself raises with its reason
        if shared(row, col):
            raise
        return None
    return choice if choice.impl is not None or shared(row, col) else None
