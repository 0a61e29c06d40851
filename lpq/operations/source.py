"""Sources: matrices whose elements are computed from other tensors, where they are not read.

A norm or an activation function is followed by a layer that encodes its result. A kernel that computes the elements
and encodes them at once spares a write and the reads of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lpq.torch_private.dispatch import autocasts

Kind = Literal["matrix", "row", "col"]
"""The size of an input of a source: a matrix as large as the outputs, a number for each row (fp32), or one for each
column. They are given in this order."""


class Source(NamedTuple):
    """A computation of matrices of one shape, element by element."""

    name: str
    inputs: tuple[Kind, ...]
    outputs: int
    compute: Callable[..., tuple[Tensor, ...]]
    """The definition, in plain PyTorch. It makes the outputs of the inputs, which are contiguous. Where it rounds on
    the way, kernels do, too."""
    struct: str = ""
    """The struct of ``csrc/common/sources.cuh`` that computes the elements of a thread; empty: there is none."""
    program: tuple[str, str | tuple[bool, ...]] | None = None
    """The function of ``lpq.kernels.triton.sources`` that computes a tile, and what it is given: the name of another
    function there, or options; None: there is none."""
    high_under_autocast: bool = False
    """Whether autocast computes an operator of its definition in fp32 on some device, and so rounds less often."""


class Between(NamedTuple):
    """The computations between the layers of an MLP."""

    product: Source
    """Makes the input of the last layer."""
    backward: Source
    """Makes, of the inputs of ``product`` and the gradient of its result: the gradients of the inputs, and the result
    once more."""


class Activation(NamedTuple):
    """An activation function of an MLP."""

    gated: Between
    """The activation of ``gate`` times ``up``, rounded twice, as modules of PyTorch do it."""
    alone: Between
    """The activation of ``up``."""

    @property
    def is_high(self) -> bool:
        """Whether autocast is on, and may compute a part of it in fp32."""
        return self.alone.product.high_under_autocast and autocasts()

    def compute(self, *inputs: Tensor) -> Tensor:
        """Compute the input of the last layer by torch's operations."""
        return (self.gated if len(inputs) > 1 else self.alone).product.compute(*inputs)[0]


def _activation(
    name: str, function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor], struct: str,
    in_triton: bool = True, high_under_autocast: bool = False,
) -> Activation:  # fmt: skip
    """``gradient(dy, x)`` is the gradient that autograd computes."""

    def gated(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (function(gate) * up,)

    def gated_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        active = function(gate)
        return gradient(dy * up, gate), dy * active, active * up

    def source(
        of: str, inputs: int, outputs: int, compute: Callable[..., tuple[Tensor, ...]], kind: str, program: str
    ) -> Source:
        kinds: list[Kind] = ["matrix"] * inputs
        written = (program, name) if in_triton else None
        compiled = f"sources::{kind}<sources::{struct}>"
        return Source(of, tuple(kinds), outputs, compute, compiled, written, high_under_autocast)

    return Activation(
        Between(
            source(f"{name}_gate", 2, 1, gated, "Gated", "gated"),
            source(f"{name}_gate_backward", 3, 3, gated_backward, "GatedBackward", "gated_backward"),
        ),
        Between(
            source(name, 1, 1, lambda up: (function(up),), "Alone", "alone"),
            source(
                f"{name}_backward",
                2,
                2,
                lambda up, dy: (gradient(dy, up), function(up)),
                "AloneBackward",
                "alone_backward",
            ),
        ),
    )


def _new_gelu(x: Tensor) -> Tensor:
    """A GELU by tanh, operation by operation, as transformers has it for GPT-2 and Phi."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _new_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_new_gelu(leaf), leaf, dy)[0]


_aten = torch.ops.aten
ACTIVATIONS = {
    "silu": _activation("silu", F.silu, _aten.silu_backward, "Silu"),
    "gelu": _activation("gelu", F.gelu, _aten.gelu_backward, "Gelu", in_triton=False),  # its erf has other bits
    "gelu_tanh": _activation(
        "gelu_tanh", partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh"), "GeluTanh"
    ),
    "gelu_new": _activation("gelu_new", _new_gelu, _new_gelu_backward, "NewGelu", high_under_autocast=True),  # a power
    "relu": _activation("relu", F.relu, lambda dy, x: _aten.threshold_backward(dy, F.relu(x), 0), "Relu"),
}
