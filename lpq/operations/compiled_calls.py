"""Functions that compiled code calls in place of operators: their bodies, without the dispatcher.

An operator costs the host several times as much as its bound kernel: the dispatcher, and lists of tensors. A compiled
layer calls eight. The device is the current one, as Inductor makes it for the code that it writes.
"""

from __future__ import annotations

import torch

from lpq.operations.multiplicands import multiplicand_tensors
from lpq.operations.multiplying import gemm_tensors
from lpq.operations.operators import define
from lpq.operations.quantizing import quantize_tensors
from lpq.operations.random_seeds import drawn
from lpq.torch_private.collectives import finish
from lpq.torch_private.compiling import call_in_place_of, compile_as_wait, once_when_traced

quantize, multiplicands, gemm, draw_seeds = quantize_tensors, multiplicand_tensors, gemm_tensors, drawn
"""Code that a compiler keeps on disk imports these by name, and outlives the lpq that it was written under."""


@once_when_traced
def spare_the_dispatcher() -> None:
    """Have compiled code call these functions in place of the operators, and torch's own wait."""
    for name in ("quantize", "multiplicands", "gemm", "draw_seeds"):
        call_in_place_of(f"lpq::{name}", __name__, name)
    compile_as_wait(torch.ops.lpq.arrived.default)


define("arrived(Tensor begun) -> Tensor", lambda begun: finish(begun).clone(), torch.empty_like)
