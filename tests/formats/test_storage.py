"""A storage describes the buffers that it was made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lpq
from lpq import operations
from lpq.core import Buffer, Quantizer, Stat, Storage


class Scaled(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))


class ByOption(Storage):
    """Its layout depends on the quantizer."""

    @classmethod
    def layout_for(cls, quantizer: Quantizer) -> tuple[Buffer, ...]:
        return Scaled.layout


def said(made: Storage, name: str) -> tuple[str, str | None]:
    """Return the error of a missing attribute, and the name to which Python would suggest similar ones."""
    with pytest.raises(AttributeError) as caught:
        getattr(made, name)
    return str(caught.value), caught.value.name


def test_a_buffer_that_was_not_given_is_named() -> None:
    data = torch.zeros(2, 2, dtype=torch.int8)
    for made in (Scaled(data=data), bound(ByOption(data=data))):
        words = f"{type(made).__name__} was made without its buffer 'scale': given were ['data']"
        assert said(made, "scale") == (words, None)
        assert not hasattr(made, "scale")
    words = "ByOption has no attribute 'scale'; its buffers are ['data']"  # none is known, but for those given
    assert said(ByOption(data=data), "scale") == (words, "scale")
    assert Scaled(data=data, scale=data).scale is data


def test_what_is_no_buffer_is_another_matter() -> None:
    data = torch.zeros(2, 2, dtype=torch.int8)
    words = "Scaled has no attribute 'scal'; its buffers are ['data', 'scale']"
    for made in (Scaled(data=data), Scaled(data=data, scale=data)):
        assert said(made, "scal") == (words, "scal")


SHAPES = [(24, 384), (24, 16), (1, 300), (0, 64), (5, 0)]
BY_COLUMNS = {
    "mxfp8": True, "fp8(scaling=block)": True, "fp8(scaling=block, block=128x128)": False, "nvfp4": True,
    "nvfp4(block=16x16)": False,
}  # fmt: skip
"""Whether scales lie column by column when they are fresh."""


def steps(t: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", BY_COLUMNS)
def test_fresh_scales_lie_as_the_layout_says_and_kept_ones_by_rows(text: str, shape: tuple[int, int]) -> None:
    quantizer, x = lpq.quantizer(text), torch.randn(shape)
    row, col, _ = operations.quantize(x, None, quantizer.side("row"), quantizer.side("col"))
    kept = quantizer.quantize(x)
    for fresh, other, matrix in ((row, kept.row, x), (col, kept.col or kept.operand("col"), x.t())):
        assert fresh is not None
        assert other is not None
        for made in (fresh, fresh.fresh(fresh.quantizer, fresh.shape, matrix)):
            data, scale = made.tensors()[:2]
            assert data.is_contiguous()
            if scale.numel():
                assert steps(scale) == steps(scale.t().contiguous().t() if BY_COLUMNS[text] else scale.contiguous())
        for t in (*other.tensors(), *fresh.row_major().tensors()):
            assert t.is_contiguous()
            if BY_COLUMNS[text]:  # also where a dimension is 1, which has any stride
                assert t.stride() == torch.empty(t.shape).stride()
                assert not t.dim() or t.view(torch.uint8).numel() == t.nbytes
        assert torch.equal(other.decode(), fresh.decode())
        assert torch.equal(other.scale, fresh.scale)


def test_whether_two_buffers_are_the_same_is_asked_of_any_order() -> None:
    for text in ("fp8", "fp8(scaling=block)"):
        quantizer = lpq.quantizer(text)
        one, other = quantizer.quantize(torch.ones(4, 128)), quantizer.quantize(torch.ones(4, 128))
        assert torch.equal(torch.cat([one, other]).dequantize(), torch.ones(8, 128))


def test_one_value_has_no_order() -> None:
    with pytest.raises(ValueError, match="buffer 'amax' is one value"):
        Buffer("amax", torch.float32, block=(None, None), column_major=True)
    with pytest.raises(ValueError, match="'data' has 3 values for each block: it cannot be column_major"):
        Buffer("data", torch.uint8, values=3, column_major=True)
    with pytest.raises(ValueError, match="'data' has values=0: say how many each block has, 1 or more"):
        Buffer("data", torch.uint8, values=0)


def test_a_buffer_that_lies_right_is_not_copied() -> None:
    by_columns, by_rows = Buffer("scale", torch.float32, column_major=True), Buffer("scale", torch.float32)
    t = torch.arange(6.0).reshape(2, 3)
    assert by_rows.laid(t) is t
    assert by_columns.laid(t.t()).stride() == (1, 3)
    assert by_columns.laid(t.t()).data_ptr() == t.data_ptr()
    turned = by_columns.laid(t)
    assert torch.equal(turned, t)
    assert turned.stride() == (1, 2)
    assert by_rows.laid(turned).stride() == (3, 1)


def bound(made: Storage) -> Storage:
    """Bound to a quantizer whose buffers have the names of these."""
    quantizer = lpq.quantizer("mxfp8")
    assert quantizer.names == ("data", "scale")
    return made.bind(quantizer, (2, 2), torch.float32)


@pytest.mark.parametrize("block", [3, (1, 2, 3), (0, 2), (1, 2.0), (1, -1), [1, 2]], ids=str)
def test_a_block_is_two_numbers_or_none(block: Any) -> None:
    for declare in (lambda: Buffer("scale", torch.float32, block=block), lambda: Stat("scale", block=block)):
        with pytest.raises(ValueError, match=r"'scale' has block=.*: it is \(rows, columns\), each a whole number"):
            declare()
    assert Buffer("scale", torch.float32, block=(None, 1)).grid(3, 4) == (1, 4)


def test_a_statistic_is_reduced_by_max_or_sum() -> None:
    with pytest.raises(ValueError, match="reduce='min': choose 'max', or 'sum' for counts; for a least value measure"):
        Stat("low", reduce="min")  # type: ignore[arg-type]
    assert Stat("low").reduce == "max"
