"""Column operands that follow from row operands, written to given memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lpq
from lpq.operations.derived_operands import Derived, bind_derive_into, derive_col
from lpq.testing.expect import same

TEXTS = (
    "fp8", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)", "hybrid(row=fp8, col=nvfp4, col_source=row)",
    "hybrid(row=fp8(scaling=row), col=mxfp8, col_source=row)", "identity",
)  # fmt: skip


def poisoned(buffer: Tensor) -> Tensor:
    """Memory as that of a buffer, each byte of which is another one."""
    return (buffer.view(-1).view(torch.uint8) ^ 0xA5).view(buffer.dtype).view(buffer.shape)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (0, 16), (16, 0), (3, 32, 48)])
def test_they_are_those_of_derive_col(text: str, shape: tuple[int, ...]) -> None:
    quantizer = lpq.quantizer(text)
    row = quantizer.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1))).operand("row")
    wanted = [buffer.contiguous() for buffer in derive_col(quantizer, row).tensors()]
    out = [poisoned(buffer) for buffer in wanted]
    (derive,) = bind_derive_into([Derived(quantizer, row, out)], torch.device("cpu"))
    derive()
    for i, (made, expected) in enumerate(zip(out, wanted, strict=True)):
        same(made, expected, f"buffer {i} of {text}, {shape}")
