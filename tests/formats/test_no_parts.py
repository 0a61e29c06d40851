"""Operands that have no parts along a dimension: slices and joints of them are decoded, and right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import whole_formats
from torch import Tensor

import lpq
from lpq import QuantizedTensor, registry
from lpq.core import PrecisionWarning
from lpq.testing.operands import normal

SPANNING = {"whole_outlier": "'place' of ", "whole_codebook": "'low' of ", "whole_mixed": "must not be cut"}


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> Iterator[None]:
    whole_formats.register()
    yield
    registry.refresh()


def _values(t: Tensor) -> Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
@pytest.mark.parametrize("text", whole_formats.NAMES)
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_slices_and_joints_have_the_right_values(text: str, sides: tuple[bool, bool]) -> None:
    t = lpq.quantizer(text).quantize(normal(64, 96), row=sides[0], col=sides[1])
    plain = t.dequantize()
    for dim in (0, 1):
        half = t.shape[dim] // 2
        pieces, expected = t.split(half, dim), plain.split(half, dim)
        for piece, right in zip(pieces, expected, strict=True):
            assert torch.equal(_values(piece), right), (dim, piece.shape)
        assert torch.equal(_values(torch.cat(list(pieces), dim)), plain)
        other = lpq.quantizer(text).quantize(2 * normal(64, 96), row=sides[0], col=sides[1])
        assert torch.equal(_values(torch.cat([t, other], dim)), torch.cat([plain, other.dequantize()], dim))
    assert isinstance(t[:], QuantizedTensor), "all of it is no part"
    assert isinstance(t[:32], QuantizedTensor) == (sides == (True, False)), "whole rows of a row operand are its own"


@pytest.mark.parametrize("text", SPANNING)
def test_what_is_assigned_to_a_part_is_encoded(text: str) -> None:
    t = lpq.quantizer(text).quantize(normal(64, 96))
    values = t.dequantize()
    values[:, 8:16] = 5
    t[:, 8:16] = 5
    assert torch.equal(t.dequantize(), lpq.quantizer(text).quantize(values).dequantize())


@pytest.mark.parametrize(("text", "words"), SPANNING.items())
def test_that_is_said(text: str, words: str) -> None:
    quantizer = lpq.quantizer(text)
    assert quantizer.why_no_parts(0) is None
    assert words in str(quantizer.why_no_parts(1))
    with pytest.warns(PrecisionWarning, match="runs on the decoded tensor"):
        quantizer.quantize(normal(64, 96))[:, :32]


@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=row)", "fp8(scaling=delayed)", "mxfp8", "nvfp4", "identity"])
def test_scales_that_follow_from_a_statistic_stand_for_parts(text: str) -> None:
    assert [lpq.quantizer(text).why_no_parts(dim) for dim in (0, 1)] == [None, None]
    assert isinstance(lpq.quantizer(text).quantize(normal(64, 96))[:, 32:64], QuantizedTensor)


@pytest.mark.parametrize("shape", [(64, 128), (64, 256), (128, 128), (1, 1), (3, 200)])
def test_buffers_lie_as_fresh_ones(shape: tuple[int, int]) -> None:
    """A dimension of one element has the stride of a fresh tensor, so that a buffer can be viewed as bytes."""
    t = lpq.quantizer(whole_formats.STRIDED).quantize(normal(*shape))
    for _, operand in t.operands:
        for buffer in operand.tensors():
            assert buffer.stride() == torch.empty(buffer.shape).stride()
            buffer.view(-1).view(torch.uint8)
