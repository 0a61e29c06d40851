"""What a storage says of the buffers that it was made of."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.core import Buffer, Quantizer, Storage, operations


class Scaled(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))


class ByOption(Storage):
    """Its layout depends on the quantizer."""

    @classmethod
    def layout_for(cls, quantizer: Quantizer) -> tuple[Buffer, ...]:
        return Scaled.layout


def said(made: Storage, name: str) -> tuple[str, str | None]:
    """What is raised when the attribute is asked for, and the name to which Python would suggest similar ones."""
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


ORDERS = {
    "mxfp8": (1, 24),
    "fp8(scaling=block)": (1, 24),
    "fp8(scaling=block, block=128x128)": (3, 1),
    "nvfp4": (24, 1),
}
"""How the scales of 24x384 elements lie in memory when they are fresh."""


@pytest.mark.parametrize("text", ORDERS)
def test_fresh_scales_lie_as_the_layout_says_and_kept_ones_by_rows(text: str) -> None:
    side = lpq.quantizer(text).side("row")
    x = torch.randn(24, 384)
    fresh, _, _ = operations.quantize(x, None, side, None)
    assert fresh is not None
    for made in (fresh, fresh.fresh(side, (24, 384), x)):
        data, scale = made.tensors()[:2]
        assert data.is_contiguous()
        assert tuple(s for size, s in zip(scale.shape, scale.stride(), strict=True) if size > 1) == tuple(
            s for size, s in zip(scale.shape, ORDERS[text], strict=True) if size > 1
        )
    kept = lpq.quantizer(text).quantize(x, col=False).row
    assert kept is not None
    assert all(t.is_contiguous() for t in (*kept.tensors(), *fresh.row_major().tensors()))
    assert torch.equal(kept.decode(), fresh.decode())
    assert torch.equal(kept.scale, fresh.scale)


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
