"""Seeds of stochastic rounding, drawn from torch's generator."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.random_bits import MASK
from lpq.operations.operators import can_bypass_dispatcher, define, opaque_when_traced
from lpq.torch_private.compiling import saved_if_run_again


def draw_seeds(x: Tensor, owner: Tensor, count: int) -> Tensor:
    """Seeds from torch's generator, on the device of ``x``, without a host synchronisation.

    This is an operator of its own, because a compiler takes liberties with a mere ``randint``: if only backward uses
    the result, it draws in backward, in another order. The operator stays where ``x``, the layer's input, is; and
    ``owner``, the layer's weight, keeps apart the draws of layers that share an input, which would else be merged.
    """
    if can_bypass_dispatcher(x):
        return drawn(x, owner, count)
    return drawn_by_operator(x, owner, count)


@opaque_when_traced
def drawn_by_operator(x: Tensor, owner: Tensor, count: int) -> Tensor:
    """Draw the seeds where something watches or traces. Torch 2.13 mixes up what it keeps for backward where backward
    draws random numbers again."""
    return saved_if_run_again(torch.ops.lpq.draw_seeds, x, owner, count)


def with_one_turn(seeds: Tensor, turn: Tensor | None) -> Tensor:
    """Give these seeds of the tensors of a pass, along their first dimension, one lower half, by which rotations are
    drawn: ``turn``, if an operand is there already, else the lower half of the first seed."""
    lower = (seeds[:1] if turn is None else turn.long()) & MASK
    return (seeds & ~MASK) | lower


def drawn(x: Tensor, owner: Tensor, count: int) -> Tensor:
    """Draw the seeds, as the operator does."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, device=x.device)


define(
    "draw_seeds(Tensor x, Tensor owner, int count) -> Tensor",
    drawn,
    lambda x, owner, count: x.new_empty((count,), dtype=torch.int64),
    tags=(torch.Tag.nondeterministic_seeded,),
)
