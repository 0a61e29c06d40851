"""Sources: matrices whose elements are computed from other tensors, where they are not read.

A norm or an activation function is followed by a layer that encodes its result. A kernel that computes the elements
and encodes them at once spares a write and the reads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["matrix", "row", "col"]
"""The size of an input of a source: a matrix as large as the outputs, a number for each row (fp32), or one for each
column. They are given in this order."""


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


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (activation(gate) * up,)


def _gated_backward(
    activation: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
) -> tuple[Tensor, ...]:
    active = activation(gate)
    return backward(dy * up, gate), dy * active, active * up


def _gates(
    name: str, activation: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor], struct: str
) -> tuple[Source, Source]:
    """``activation(gate) * up``, rounded twice, as modules of PyTorch compute it. And, of ``gate``, ``up`` and the
    gradient of that: the gradients of both, and the same output once more."""
    return (
        Source(name, ("matrix",) * 2, 1, partial(_gated, activation), f"sources::Gated<sources::{struct}>"),
        Source(
            f"{name}_backward", ("matrix",) * 3, 3, partial(_gated_backward, activation, backward),
            f"sources::GatedBackward<sources::{struct}>",
        ),
    )  # fmt: skip


ADD = Source("add", ("matrix", "matrix"), 1, lambda a, b: (a + b,), "sources::Add")
SWIGLU, SWIGLU_BACKWARD = _gates("swiglu", F.silu, torch.ops.aten.silu_backward, "Silu")
GEGLU, GEGLU_BACKWARD = _gates("geglu", F.gelu, torch.ops.aten.gelu_backward, "Gelu")
GEGLU_TANH, GEGLU_TANH_BACKWARD = _gates(
    "geglu_tanh", partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "GeluTanh",
)  # fmt: skip
