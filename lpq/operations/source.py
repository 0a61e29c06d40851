"""Sources: matrices whose elements are computed from other tensors, where they are not read.

A norm or an activation function is followed by a layer that encodes its result. A kernel that computes the elements
and encodes them at once spares a write and the reads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["matrix", "row", "col"]
"""The size of an input of a source: a matrix as large as the outputs, a number for each row, or one for each column."""


class Source(NamedTuple):
    """A computation of matrices of one shape and dtype, element by element."""

    name: str
    inputs: tuple[Kind, ...]
    outputs: int
    compute: Callable[..., tuple[Tensor, ...]]
    """The definition, in plain PyTorch. It makes the outputs of the inputs, which are contiguous. Where it rounds on
    the way, kernels do, too."""
    struct: str = ""
    """The struct of ``csrc/common/sources.cuh`` that computes the elements of a thread; empty: there is none."""


def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(gate) * up,)


def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    active = F.silu(gate)
    return torch.ops.aten.silu_backward(dy * up, gate), dy * active, active * up


SWIGLU = Source("swiglu", ("matrix", "matrix"), 1, _swiglu, "sources::Swiglu")
"""``silu(gate) * up``, rounded twice, as modules of PyTorch compute it."""
SWIGLU_BACKWARD = Source(
    "swiglu_backward", ("matrix", "matrix", "matrix"), 3, _swiglu_backward, "sources::SwigluBackward"
)
"""Of ``gate``, ``up`` and the gradient of ``SWIGLU``'s output: the gradients of both, and that output once more."""
