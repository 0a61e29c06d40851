"""Norms: how each kind computes and rounds, and the source by which a kernel computes the elements.

No tile of a kernel has a whole row, so what rows have in common is found before: the reciprocal of the root of the
mean square, or of the variance, and the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lpq import registry
from lpq.operations.source import Kind, Source


class NormKind(NamedTuple):
    """A norm over the last dimension. It computes in fp32; the fields say where it rounds to the dtype of its input."""

    eps: float | None
    """The number added to the mean square, or to the variance; None: the one that ``F.rms_norm`` chooses."""
    centers: bool = False
    """Whether it subtracts the mean of a row, and divides by the root of the variance."""
    offset: bool = False
    """Whether the factor of a column is ``1 + weight``."""
    rounds: bool = False
    """Whether it rounds before it multiplies by the weight, and again after."""

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The norm, by the operations of a module that computes it; autograd's gradients are the module's, too."""
        if self.centers:
            assert self.eps is not None
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        if not (self.offset or self.rounds):
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        high = x.float()
        normed = high * self.rows(high)[0]
        if self.offset:
            return (normed * (1.0 + weight.float())).type_as(x)
        return weight * normed.to(x.dtype)

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return, with one column, what the rows of ``x`` have in common: the factor, and the mean before it where it
        is subtracted."""
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if self.centers:
            _, mean, factor = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
            return mean, factor
        return (torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps),)


@registry.cached
def norm_source(norm: NormKind, biased: bool = False) -> Source:
    """Return the source of a norm: of ``x``, what ``NormKind.rows`` returns, the weight and, if so, the bias."""

    def compute(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        (*rows, weight), bias = (rest[:-1], rest[-1]) if biased else (rest, None)
        normed = x.float()
        if norm.centers:
            normed = normed - rows[0]
        normed = normed * rows[-1]
        if norm.rounds:
            return (weight * normed.to(x.dtype),)
        factor = 1.0 + weight.float() if norm.offset else weight.float()
        y = normed * factor if bias is None else torch.addcmul(bias.float(), normed, factor)
        return (y.to(x.dtype),)

    rows: tuple[Kind, ...] = ("row", "row") if norm.centers else ("row",)
    columns: tuple[Kind, ...] = ("col", "col") if biased else ("col",)
    return Source("layer_norm" if norm.centers else "rms_norm", ("matrix", *rows, *columns), 1, compute)
