"""A layer refuses inputs in words that name it, before anything is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "identity"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bias_that_does_not_fit_is_refused_in_words(text: str, device: str) -> None:
    """A kernel would read behind the end of a short one, and the reference adds whatever can be broadcast."""
    a, b = (lpq.quantizer(text).quantize(torch.randn(rows, 64, device=device)).row for rows in (48, 32))
    for shape in ((1,), (), (31,), (48,), (48, 32), (1, 32)):
        with pytest.raises(ValueError, match=r"gemm: the bias is \[.*\], and b has 32 rows: .* shape \[32\]"):
            lpq.gemm(a, b, bias=torch.zeros(shape, device=device))
    elsewhere = "meta" if device == "cpu" else "cpu"
    with pytest.raises(ValueError, match=rf"the bias is on {elsewhere} and the operands are on {device}: move one"):
        lpq.gemm(a, b, bias=torch.zeros(32, device=elsewhere))
    with pytest.raises(TypeError, match="the bias is a list: it must be a tensor, or None"):
        lpq.gemm(a, b, bias=[0.0] * 32)
    assert lpq.gemm(a, b, bias=torch.zeros(32, device=device)).shape == (48, 32)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    y = lpq.nn.Linear(48, 32, recipe="mxfp8")(x).sum()  # of which dx does not depend on x: nobody would notice
    with pytest.raises(RuntimeError, match="create_graph=True: a layer with a recipe has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current", "bf16"])
@pytest.mark.parametrize(
    "write",
    [lambda w: w.copy_(2 * w.detach()), lambda w: w[:32].zero_(), lambda w: w.data.fill_(2)],
)
def test_a_stored_weight_that_is_written_to_before_backward_is_refused(recipe: str, write: Any) -> None:
    layer = lpq.convert(nn.Sequential(nn.Linear(64, 64)), recipe, weights="quantized")[0]
    y = layer(torch.randn(4, 64, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        write(layer.weight)
    words = r"0\.weight: a weight of \[64, 64\] that is stored quantized was written to after forward"
    with pytest.raises(RuntimeError, match=words):
        y.backward()


def test_a_held_weight_that_is_another_now_is_refused() -> None:
    layer = lpq.nn.Linear(64, 32, recipe="fp8-current")
    x, old = torch.randn(4, 64), layer.weight

    def recipe() -> None:
        layer.recipe = "mxfp8"

    def weight() -> None:
        layer.weight = nn.Parameter(torch.randn(32, 64))

    def passes(change: Callable[[], None]) -> None:
        with lpq.hold_weights(layer):
            layer(x)
            change()
            layer(x)
            pytest.fail("the pass must say it")

    for change in (recipe, weight):
        layer.recipe, layer.weight = "fp8-current", old
        with pytest.raises(RuntimeError, match="the weight was changed while its encoded form is held, or has another"):
            passes(change)
    with lpq.hold_weights(layer):  # of the same format another recipe may have the weight, or none
        layer.recipe = "x=mxfp8(), w=fp8(), dy=mxfp8()"
        layer(x)
        layer.recipe = None
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("recipe", registry.recipes())
def test_other_dtypes_are_refused_in_words(recipe: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float64):
        with pytest.raises(TypeError, match=rf"Linear\(48, 32\): the input is {dtype}"):
            lpq.nn.Linear(48, 32, recipe=recipe)(torch.ones(2, 48).to(dtype))
    with pytest.raises(TypeError, match=r"the weight is torch\.float64"):
        lpq.nn.Linear(48, 32, recipe=recipe).double()(torch.ones(2, 48))


def test_sparse_inputs_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"Linear\(48, 32\): the input is torch\.sparse_coo: pass x\.to_dense\(\)"):
        lpq.nn.Linear(48, 32, recipe="mxfp8")(torch.randn(2, 48).to_sparse())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_inputs_are_refused_in_words(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 48), torch.randn(3, 48)], layout=layout)
    layer = lpq.nn.Linear(48, 32, recipe="mxfp8")
    with pytest.raises(TypeError, match=r"Linear\(48, 32\): the input is nested: pass x\.values\(\)"):
        layer(x)
    if layout == torch.jagged:
        assert layer(x.values()).shape == (5, 32)
