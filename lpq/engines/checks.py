"""Refusals of tensors with which an engine cannot compute: codes that are NaN, scales that are not finite, zero
values."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
from lpq.registry import Part

NAN = 0x7F
"""The code of NaN in E4M3 without its sign, and the code above the last finite code of E5M2."""
PIECE = 2**18
"""The number of codes that are checked together, which takes little memory."""
NO_POWER = 255
"""The exponent that means NaN."""


def check_value(name: str, part: Part, value: Tensor) -> None:
    """Refuse a tensor of a quantized layer that engines cannot compute with. It needs no copy in high precision."""
    wrong = False
    if part.holds == "exponents":
        wrong = bool((value.view(torch.uint8) == NO_POWER).any())
    elif part.holds == "codes" and value.dtype == torch.float8_e4m3fn:
        pieces = torch.split(value.view(torch.uint8).reshape(-1), PIECE)
        wrong = bool(torch.stack([((piece & NAN) == NAN).any() for piece in pieces]).any())
    elif part.holds in ("scales", "value"):
        wrong = not bool(torch.isfinite(value.float()).all())
    if part.holds == "scales" and bool((value.float() < 0).any()):
        raise CheckpointError(f"{name} has scales below 0, which no format has: the file was changed")
    if wrong:
        raise CheckpointError(
            f"{name} has values that are not finite: the weight has a NaN or an infinity. Look at it before it is used"
        )
    if part.holds == "value" and not bool((value.float() > 0).all()):
        raise CheckpointError(f"{name} is {value.float().flatten().tolist()[:1]}, and engines divide by it")
