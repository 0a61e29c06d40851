"""The activation between two layers of which the first makes gate and up, as halves of each row.

It takes one kernel, where torch takes two, and one in backward, where torch takes five and writes both gradients twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lpq.kernels.table import bound_once
from lpq.operations.binding import on_device
from lpq.operations.inputs import as_matrix
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.produced_tiles import Values
from lpq.operations.producer import bind_halves
from lpq.operations.source import Activation, Source
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.operators import unsafe_view


def activate(halves: Tensor, activation: Activation) -> Tensor:
    """``act(gate) * up`` of ``gate, up = halves.chunk(2, -1)``."""
    if torch.compiler.is_compiling() or activation.is_high:
        return activation.compute(*halves.chunk(2, dim=-1))
    if autocasts() and torch.is_autocast_enabled(halves.device.type):  # which has no part in it
        with torch.autocast(halves.device.type, enabled=False):
            return activate(halves, activation)
    if not can_bypass_dispatcher(halves):
        return activation.compute(*halves.chunk(2, dim=-1))
    compute: Any = ActivatedHalves.apply
    with on_device(halves.device):
        y: Tensor = compute(halves, activation)
    return y


class ActivatedHalves(torch.autograd.Function):
    """The activation. It keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, halves: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(halves)
        ctx.activation = activation
        y = _values(activation.gated.product, halves)
        whole: Tensor = unsafe_view(y, (*halves.shape[:-1], y.shape[-1]))
        return whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (halves,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not can_bypass_dispatcher(dy):
            with torch.enable_grad():
                y = ctx.activation.compute(*halves.chunk(2, dim=-1))
            return torch.autograd.grad(y, halves, dy, create_graph=torch.is_grad_enabled())[0], None
        with on_device(dy.device):
            return _values(ctx.activation.gated.backward, halves, dy).view(halves.shape), None


def _values(source: Source, halves: Tensor, *others: Tensor) -> Tensor:
    matrix = as_matrix(halves)
    rows, cols = matrix.shape
    bound = _bound(source, rows, cols // 2, matrix.dtype, matrix.device)
    return bound(matrix, *(as_matrix(x) for x in others))


@bound_once
def _bound(source: Source, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Values:
    return bind_halves(source, (rows, cols), dtype, device)
