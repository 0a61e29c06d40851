"""Formats that are made of others, and operands that have no parts along a dimension."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import residual_format
import torch
import whole_formats
from support.comparing import as_bytes
from torch import Tensor

import lpq
from lpq import QuantizedTensor, registry
from lpq.core import PrecisionWarning
from lpq.registry.errors import OptionError
from lpq.testing.operands import normal

PAIRS = [("nvfp4", "mxfp8"), ("mxfp8", "nvfp4(rht=true)"), ("fp8", "fp8"), ("hybrid(row=mxfp8, col=nvfp4)", "fp8")]


@pytest.fixture(scope="module", autouse=True)
def third_party() -> Iterator[None]:
    residual_format.register()
    yield
    registry.refresh()


@pytest.mark.parametrize(("base", "rest"), PAIRS)
def test_the_parts_are_what_their_quantizers_make(base: str, rest: str) -> None:
    """Byte for byte: of the matrix, and of what the first leaves."""
    x = normal(64, 96)
    t = lpq.quantizer(f"residual(base={base}, rest={rest})").quantize(x)
    for direction, operand in t.operands:
        matrix = x if direction == "row" else x.t()
        first = lpq.quantizer(base).quantize(x).operand(direction)
        left = matrix - first.decode()
        left = left if direction == "row" else left.t()
        second = lpq.quantizer(rest).quantize(left).operand(direction)
        expected = {f"{name}_{k}": b for name, s in (("base", first), ("rest", second)) for k, b in s.buffers().items()}
        made = operand.buffers()
        assert made.keys() == expected.keys()
        assert all(torch.equal(as_bytes(made[name]), as_bytes(expected[name])) for name in made)
        assert torch.equal(operand.decode(), first.decode() + second.decode())


def test_slices_stay_quantized_where_no_part_is_of_the_whole() -> None:
    x = normal(64, 96)
    t = lpq.quantizer("residual(base=nvfp4, rest=mxfp8)").quantize(x)
    for part, of in ((t[32:], t.dequantize()[32:]), (t[:, :32], t.dequantize()[:, :32])):
        assert isinstance(part, QuantizedTensor)
        assert torch.equal(part.dequantize(), of)
    whole = lpq.quantizer("residual(base=nvfp4, rest=fp8)").quantize(x)
    with pytest.warns(lpq.core.PrecisionWarning):
        assert type(whole[32:]) is torch.Tensor


def test_sides_are_the_quantizers_that_the_core_asks() -> None:
    """The same object at each call, itself where its parts do not differ, and a text that makes it again."""
    same, other = (
        lpq.quantizer("residual(base=fp8, rest=fp8)"),
        lpq.quantizer("residual(base=nvfp4(rht=true), rest=fp8)"),
    )
    assert same.side("row") is same.side("col") is same
    assert same.transposable
    assert str(other.side("row")) == "residual(base=nvfp4, rest=fp8)"
    assert other.side("col") is other
    assert lpq.quantizer(str(other.side("row"))) == other.side("row")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("base=mxfp8", "residual needs a quantizer for each part: add rest=FORMAT"),
        ("base=mxfp8, rest=fp8(scaling=delayed)", r"rest=fp8\(scaling=delayed\) remembers statistics across steps"),
        ("base=nvfp4(stochastic=true), rest=mxfp8", r"base=nvfp4\(stochastic=true\) rounds with random bits"),
        ("base=mxfp8, rest=identity", "rest=identity keeps a matrix in its own dtype"),
        ("base=hybrid(row=mxfp8, col=nvfp4, col_source=row), rest=mxfp8", "makes its column operand of its row"),
        ("base=mxfp8, rest=mxfp8, more=1", "more"),
    ],
)
def test_what_a_part_cannot_be_is_refused(options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        lpq.quantizer(f"residual({options})")


# ------------------------------------------------------------------------------------------ no parts


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
