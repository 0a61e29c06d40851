"""What a caller gives beside the tensors that are encoded or multiplied, refused in words if it makes no sense.

Kernels get it as pointers, and would read whatever lies there. What layers make for themselves comes by none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unfit_bias(bias: object, rows: int, device: torch.device) -> Exception:
    """What is wrong with a bias that is not one number, on this device, for each of so many rows of ``b``."""
    if not isinstance(bias, Tensor):
        return TypeError(f"gemm: the bias is a {type(bias).__name__}: it must be a tensor, or None")
    if bias.shape != (rows,):
        return ValueError(
            f"gemm: the bias is {list(bias.shape)}, and b has {rows} rows: pass one number for each of them, "
            f"of shape [{rows}]"
        )
    return ValueError(f"gemm: the bias is on {bias.device} and the operands are on {device}: move one to the other")
