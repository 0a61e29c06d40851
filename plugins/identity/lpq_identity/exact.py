"""A matrix in bf16 is exact in bf16, so that it can be multiplied with an operand of any format."""

from __future__ import annotations

import torch

from lpq.operations.exact_form import Exact
from lpq_identity.quantizer import IdentityQuantizer
from lpq_identity.storage import IdentityStorage


def why_not(quantizer: IdentityQuantizer) -> str | None:
    """Refuse fp32 and fp16. Without an option, the dtype of the matrix decides, in ``exact``."""
    return f"{quantizer.dtype} is not exact in bf16" if quantizer.dtype in ("float32", "float16") else None


def exact(operand: IdentityStorage) -> Exact | None:
    """The matrix. A view of a transposed one is copied."""
    return Exact(operand.data.contiguous()) if operand.data.dtype == torch.bfloat16 else None
