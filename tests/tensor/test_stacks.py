"""A QuantizedTensor that is a stack of matrices, which PyTorch cuts between them; joined tensors, and dimensions that
do not exist. That each matrix is encoded by itself, with random bits of its own, the conformance kit asks of every
format."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from support.comparing import equal_quantized
from torch import Tensor

import lpq
from lpq import QuantizedTensor
from lpq.core import PrecisionWarning
from lpq.optim import MasterWeights
from lpq.testing.operands import normal

FORMATS = ["fp8", "fp8(scaling=row)", "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4", "nvfp4(rht=true)"]
EVERY = pytest.mark.parametrize("text", [*FORMATS, "identity", "hybrid(row=mxfp8, col=nvfp4)"])


def weights() -> Tensor:
    """Two matrices of very different sizes, so that a value of both would be noticed."""
    torch.manual_seed(0)
    return torch.randn(2, 48, 40) * torch.tensor([1.0, 100.0])[:, None, None]


@EVERY
def test_it_is_cut_and_joined_between_matrices(text: str) -> None:
    stack = lpq.quantizer(text).quantize(weights(), stack=True)
    first, second = stack.chunk(2)
    assert equal_quantized(torch.cat([first, second]), stack)
    assert equal_quantized(stack.view(-1)[48 * 40 :].view(1, 48, 40)[0], stack[1])
    assert equal_quantized(stack.detach().clone().to("cpu"), stack)
    with pytest.warns(PrecisionWarning, match="no form on the buffers"):
        assert torch.equal(stack.narrow(1, 0, 16), stack.dequantize()[:, :16])


@EVERY
def test_what_is_written_to_a_matrix_is_written_to_the_stack(text: str) -> None:
    quantizer, x = lpq.quantizer(text), weights()
    stack = quantizer.quantize(x, stack=True)
    stack[1].copy_(x[0])
    assert equal_quantized(stack[1], quantizer.quantize(x[0]))
    stack[0:1].zero_()
    assert not stack[0].dequantize().any()
    assert stack[1].dequantize().any()
    stack.copy_(x)
    assert equal_quantized(stack, quantizer.quantize(x, stack=True))


@EVERY
def test_an_optimizer_steps_it_and_a_file_holds_it(text: str) -> None:
    stack = torch.nn.Parameter(lpq.quantizer(text).quantize(weights(), stack=True))
    stack.grad = torch.ones(2, 48, 40)
    before = stack.dequantize()
    MasterWeights(torch.optim.SGD([stack], lr=0.5), keep=False).step()
    assert equal_quantized(stack, lpq.quantizer(text).quantize(before - 0.5, stack=True))
    file = io.BytesIO()
    torch.save({"w": stack.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert loaded.shape == (2, 48, 40)
    assert equal_quantized(loaded, stack)
    assert equal_quantized(copy.deepcopy(stack), stack)


def test_what_a_stack_cannot_be_given_is_refused() -> None:
    x, quantizer = weights(), lpq.quantizer("fp8")
    with pytest.raises(ValueError, match=r"\[48, 40\]"):
        quantizer.quantize(x[0], stack=True)
    with pytest.raises(ValueError, match="remembers statistics"):
        lpq.quantizer("fp8(scaling=delayed)").quantize(x, stack=True)
    with pytest.raises(TypeError, match=r"int64 of shape \[2\]"):
        quantizer.quantize(x, stack=True, seed=3)


# ------------------------------------------------------------------------------------------ joins and dimensions


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
