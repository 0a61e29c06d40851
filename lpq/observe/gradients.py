"""The noise that encoding brings into the gradient of a weight, of some tokens, without a matrix of the weight's size.

The gradient is a sum over tokens, g = Σ dyₜ xₜᵀ. So a product of two such sums is a sum over pairs of tokens, of
products dyₜ·dyₛ and xₜ·xₛ. Matrices of tokens by tokens have these, and forward can keep them for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.observe.operands import EncodedRows

TOKENS = 128
"""The most tokens of which the gradient is taken."""


def pairs(operand: EncodedRows) -> Tensor:
    """The products of all pairs of tokens of a column operand, whose columns are tokens: ``[3, tokens, 3, tokens]``,
    where 0 stands for the tensor itself, 1 for what its operand decodes to, and 2 for the error."""
    x, encoded = operand.x[:, :TOKENS], operand.decoded[:, :TOKENS]
    each = torch.cat([x, encoded, encoded - x], 1)
    return (each.t() @ each).view(3, x.shape[1], 3, x.shape[1])


def signal_and_noise(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of the gradient and of its error, summed over the elements of the weight, of the pairs of both
    tensors."""
    signal = (dy[0, :, 0] * x[0, :, 0]).sum()
    both = dy[2, :, 2] * x[1, :, 1] + dy[0, :, 0] * x[2, :, 2] + 2 * dy[2, :, 0] * x[1, :, 2]
    return signal, both.sum()
