"""Formats that are made of others: what their operands hold, and which parts are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import residual_format
import torch
from support.comparing import as_bytes

import lpq
from lpq import QuantizedTensor, registry
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
