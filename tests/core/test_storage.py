"""What a storage says of the buffers that it was made of."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.core import Buffer, Quantizer, Storage


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


def bound(made: Storage) -> Storage:
    """Bound to a quantizer whose buffers have the names of these."""
    quantizer = lpq.quantizer("mxfp8")
    assert quantizer.names == ("data", "scale")
    return made.bind(quantizer, (2, 2), torch.float32)
