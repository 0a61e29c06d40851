"""What a layer refuses says so in words that name the layer, before anything is multiplied."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq import registry


def test_a_wrong_width_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"Linear\(48, 32\).*\[3, 47\].*must be 48"):
        lpq.nn.Linear(48, 32, recipe="mxfp8")(torch.randn(3, 47))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.tensor(1.0), ValueError, r"the input is \[\], its last dimension must be 32"),
        ([1.0] * 32, TypeError, "the input is a list, it must be a tensor"),
        (None, TypeError, "the input is a NoneType, it must be a tensor"),
    ],
    ids=str,
)
def test_what_is_no_matrix_is_refused_in_words(value: object, error: type[Exception], words: str) -> None:
    layer = lpq.nn.Linear(32, 32, recipe="mxfp8")
    with pytest.raises(error, match=rf"^lpq\.nn\.Linear\(32, 32\): {words}"):
        layer(value)


@pytest.mark.parametrize("recipe", registry.recipes())
def test_another_device_is_refused_in_words(recipe: str) -> None:
    """A kernel would write to the one what it reads of the other, and find it where nothing is."""
    layer = lpq.nn.Linear(64, 32, recipe=recipe)
    for weight, input in (("meta", "cpu"), ("cpu", "meta")):
        with pytest.raises(RuntimeError, match=rf"32\): the input is on {input} and the weight on {weight}: move one"):
            layer.to_empty(device=weight)(torch.randn(8, 64, device=input))


def test_operands_on_two_devices_are_not_multiplied() -> None:
    here, there = (lpq.quantizer("mxfp8").quantize(torch.randn(64, 64, device=d)).row for d in ("cpu", "meta"))
    with pytest.raises(ValueError, match="a is on cpu and b on meta"):
        lpq.gemm(here, there)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    (dx,) = torch.autograd.grad(lpq.nn.Linear(48, 32, recipe="mxfp8")(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("recipe", registry.recipes())
def test_other_dtypes_are_refused_in_words(recipe: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float64):
        with pytest.raises(TypeError, match=rf"Linear\(48, 32\): the input is {dtype}"):
            lpq.nn.Linear(48, 32, recipe=recipe)(torch.ones(2, 48).to(dtype))
    with pytest.raises(TypeError, match=r"the weight is torch\.float64"):
        lpq.nn.Linear(48, 32, recipe=recipe).double()(torch.ones(2, 48))
