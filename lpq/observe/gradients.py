"""The noise that encoding brings into the gradient of a weight, of some tokens, without a matrix of the weight's size.

The gradient is a sum over tokens, g = Σ dyₜ xₜᵀ. So a product of two such sums is a sum over pairs of tokens, of
products dyₜ·dyₛ and xₜ·xₛ. Matrices of tokens by tokens have these, and forward can keep them for backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lpq.observe.operands import EncodedRows

TOKENS = 128
"""The most tokens of which the gradient is taken."""


class Pairs(NamedTuple):
    """Products of pairs of tokens of one tensor."""

    exact: Tensor
    encoded: Tensor
    error: Tensor
    encoded_by_error: Tensor
    error_by_exact: Tensor

    @classmethod
    def of(cls, operand: EncodedRows) -> Pairs:
        """The pairs of a column operand, whose columns are tokens."""
        x, encoded = operand.x[:, :TOKENS], operand.decoded[:, :TOKENS]
        error = encoded - x
        return cls(x.t() @ x, encoded.t() @ encoded, error.t() @ error, encoded.t() @ error, error.t() @ x)


def signal_and_noise(x: Pairs, dy: Pairs) -> tuple[Tensor, Tensor]:
    """The squares of the gradient and of its error, summed over the elements of the weight."""
    signal = (dy.exact * x.exact).sum()
    both = dy.error * x.encoded + dy.exact * x.error + 2 * dy.error_by_exact * x.encoded_by_error
    return signal, both.sum()
