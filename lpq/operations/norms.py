"""Norms: how each kind computes and rounds, and the source by which a kernel computes the elements.

No tile of a kernel has a whole row, so what rows have in common is found before: the reciprocal of the root of the
mean square, or of the variance, and the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lpq import registry
from lpq.operations.source import Kind, Source
from lpq.torch_private.operators import rms_norm_gradients


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

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps

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
        eps = self.epsilon
        if self.centers:
            _, mean, factor = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
            return mean, factor
        return (torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps),)

    def gradients(
        self, dy: Tensor, given: Sequence[Tensor], rows: Sequence[Tensor], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The gradients of the input, the weight and the bias, as far as they are ``given`` and needed: as autograd
        computes them, which computes the norm again. Where the norm rounds once, the numbers that a kernel found for
        the ``rows`` spare that."""
        x, weight, *others = given
        shape, of_rows = x.shape[-1:], [found.view(*x.shape[:-1], 1) for found in rows]
        if of_rows and self.centers:
            bias, wanted = others[0] if others else None, [*needed, False][:3]
            grads: Sequence[Tensor | None] = torch.ops.aten.native_layer_norm_backward(
                dy, x, shape, *of_rows, weight, bias, wanted
            )
            return grads[: len(given)]
        if of_rows and not (self.offset or self.rounds):
            return rms_norm_gradients(dy, x, shape, *of_rows, weight, [*needed])
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(given, needed, strict=True)]
            y = self.compute(*leaves)
        found = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dy))
        return [next(found) if wanted else None for wanted in needed]


@registry.cached
def norm_source(norm: NormKind, biased: bool = False) -> Source:
    """Return the source of a norm: of ``x``, what ``NormKind.rows`` returns, the weight and, if so, the bias."""

    def compute(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        (*rows, weight), bias = (rest[:-1], rest[-1]) if biased else (rest, None)
        *mean, factor = [numbers.view(*x.shape[:-1], 1) for numbers in rows]
        normed = (x.float() - mean[0] if mean else x.float()) * factor
        if norm.rounds:
            return (weight * normed.to(x.dtype),)
        scale = 1.0 + weight.float() if norm.offset else weight.float()
        y = normed * scale if bias is None else torch.addcmul(bias.float(), normed, scale)
        return (y.to(x.dtype),)

    columns: tuple[Kind, ...] = ("col", "col") if biased else ("col",)
    if norm.centers:
        struct = f"sources::LayerNorm<{_written(biased)}>"
        return Source("layer_norm", ("matrix", "row", "row", *columns), 1, compute, struct, ("layer_norm", (biased,)))
    struct = f"sources::RmsNorm<{_written(norm.offset)}, {_written(norm.rounds)}>"
    options = norm.offset, norm.rounds
    return Source("rms_norm", ("matrix", "row", *columns), 1, compute, struct, ("rms_norm", options))


def _written(value: bool) -> str:
    """A constant as CUDA C++ has it."""
    return str(value).lower()
