"""Joined quantized tensors have memory of their own; dimensions that do not exist are refused as by torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lpq
from lpq import QuantizedTensor
from lpq.testing.operands import normal


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=row)", "nvfp4", "nvfp4(block=16x16)", "mxfp8", "identity"])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_joined_shares_nothing(text: str, dim: int) -> None:
    """Equal parts, so that one value for a whole dimension can stand for both."""
    first = lpq.quantizer(text).quantize(torch.ones(64, 64))
    second = first.clone()
    joined = torch.cat([first, second], dim)
    joined.fill_(8)
    assert torch.equal(first.dequantize(), torch.ones(64, 64))
    first.zero_()
    assert torch.allclose(joined.dequantize(), torch.full_like(joined.dequantize(), 8.0))


@pytest.mark.parametrize(
    "call", [
        lambda t: t.transpose(0, 3), lambda t: t.transpose(0, -3), lambda t: t.permute(0, 3), lambda t: t.unsqueeze(5),
        lambda t: t.unsqueeze(-9), lambda t: torch.cat([t, t], 3), lambda t: torch.ops.aten.slice.Tensor(t, 4, 0, 32),
        lambda t: torch.split(t, 32, 3),
    ]
)  # fmt: skip
def test_dimensions_that_there_are_none_of(call: Callable[[torch.Tensor], object]) -> None:
    for t in (torch.ones(64, 128), lpq.quantizer("fp8").quantize(torch.ones(64, 128))):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call(t)


def test_dimensions_from_the_end() -> None:
    t, plain = lpq.quantizer("identity").quantize(normal(64, 128)), normal(64, 128)
    for call in (
        lambda t: t.transpose(0, -1),
        lambda t: t.permute(-1, 0),
        lambda t: t.unsqueeze(-1),
        lambda t: t.unsqueeze(-3),
        lambda t: torch.cat([t, t], -2),
        lambda t: t.split(32, -1)[1],
        lambda t: t.narrow(-2, 32, 32),
    ):
        made = call(t)
        assert torch.equal(made.dequantize() if isinstance(made, QuantizedTensor) else made, call(plain))


@pytest.mark.filterwarnings("ignore:.*has no form")
def test_pieces_of_negative_sizes() -> None:
    t = lpq.quantizer("fp8").quantize(torch.ones(64, 128))
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.split(t, [32, -32, 64], 0)
