"""AdamW's step of parameters whose moments are stored in a format: what it computes, and the kernel that does it.

Everything is computed in fp32, and each operation is rounded by itself, so that a kernel equals it bit for bit on any
device. A kernel reads and writes the moments tile by tile; the reference decodes all moments of the parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lpq.formats import Quantizer
from lpq.operations.stored_tile import ALIGNMENT, StoredTile, stored_tile
from lpq.optim.rounding import LeastKept, root_of
from lpq.tensor import QuantizedTensor

FIRST, SECOND = "exp_avg", "exp_avg_sq"


class Numbers(NamedTuple):
    """The numbers of a step."""

    keep: float
    """The factor of weight decay."""
    toward: float
    """The share of the gradient in the first moment."""
    second: float
    fresh: float
    """The shares of the last second moment, and of the gradient's square, in the second moment."""
    correct: float
    """The factor that corrects the root of the second moment."""
    eps: float
    rate: float
    """The rate, with the correction of the first moment."""
    maximize: bool

    @staticmethod
    def of(group: Mapping[str, Any], step: float) -> Numbers:
        """The numbers of a group in this step, which counts from 1."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate = float(group["lr"])
        return Numbers(
            1 - rate * float(group["weight_decay"]), 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5,
            float(group["eps"]), rate / (1 - beta1**step), bool(group["maximize"]),
        )  # fmt: skip


def is_plain(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps a group as this file does."""
    if type(optimizer) is not AdamW or any(group[name] for name in ("amsgrad", "capturable", "differentiable")):
        return False
    return bool(group.get("decoupled_weight_decay", True))


def step_reference(p: Tensor, gradient: Tensor, m: Tensor, root: Tensor, n: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter, the first moment and the root of the second moment after a step, in fp32."""
    g = -gradient.float() if n.maximize else gradient.float()
    m = m + (g - m) * n.toward
    root = root_of(root * root * n.second + g * g * n.fresh)
    return p.float() * n.keep - m / (root * n.correct + n.eps) * n.rate, m, root


class Tiles(NamedTuple):
    """The functions of both moments in a program."""

    first: StoredTile
    second: StoredTile
    share: float
    """The least share of the largest root in a block that its format keeps; 0 if it keeps all."""


def tiles(first: Quantizer, second: Quantizer, least: LeastKept | None, device: torch.device) -> Tiles | None:
    """The functions with which a kernel steps moments in these formats on this device; None: there is no kernel."""
    both = stored_tile(first, device), stored_tile(second, device)
    if both[0] is None or both[1] is None:
        return None
    if least is not None and least.stat.block != (1, both[1].width):
        return None
    return Tiles(both[0], both[1], 0.0 if least is None else least.share)


class Work(NamedTuple):
    """A parameter, and what its step reads and writes beside it."""

    p: Tensor
    gradient: Tensor
    m: QuantizedTensor
    root: QuantizedTensor
    buffers: list[Tensor]
    """Codes and scales of both moments."""

    def kind(self) -> tuple[Hashable, ...]:
        """The same for all parameters of a launch."""
        p, gradient = self.p, self.gradient
        addresses = [tensor.data_ptr() for tensor in (p, gradient, *self.buffers)]
        aligned = not any(number % ALIGNMENT for number in (p.shape[-1], *addresses))
        return p.device, p.dtype, gradient.dtype, aligned

    def is_contiguous(self) -> bool:
        """Whether a kernel can write what is written."""
        return self.p.is_contiguous() and all(buffer.is_contiguous() for buffer in self.buffers)


def step_kernel(works: Sequence[Work], n: Numbers, tiles: Tiles) -> None:
    """Step parameters of a kind and encode their moments, in one launch."""
    from lpq.optim.adamw_triton import launch_step

    *numbers, maximize = n
    each = [(w.p, w.gradient.contiguous(), *w.buffers) for w in works if w.p.numel()]
    if each:
        launch_step(each, numbers, bool(maximize), *tiles)
