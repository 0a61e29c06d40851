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
    """The products of all pairs of tokens of a column operand, whose columns are tokens: ``[2, 2, tokens, tokens]``,
    where 0 stands for the tensor itself, and 1 for the error of its operand."""
    x, encoded = operand.x[:, :TOKENS], operand.decoded[:, :TOKENS]
    both = torch.cat([x, encoded - x], 1)
    return (both.t() @ both).view(2, x.shape[1], 2, x.shape[1]).transpose(1, 2)


def signal_and_noise(x: Tensor, dy: Tensor) -> Tensor:
    """The squares of the gradient and of its error, summed over the elements of the weight, of the pairs of both
    tensors."""
    of_encoded = x.sum((0, 1))  # the operand decodes to the tensor and the error
    (of_x, by_error), (_, of_error) = x
    (of_dy, _), (dy_by_error, of_dy_error) = dy
    noise = of_dy_error * of_encoded + of_dy * of_error
    noise.addcmul_(dy_by_error, by_error + of_error, value=2)
    return torch.stack([of_dy * of_x, noise]).sum((1, 2))
