"""A QuantizedTensor that is a stack of matrices, which PyTorch cuts between them.

That each is encoded by itself, with random bits of its own, the conformance kit asks of every format.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

import lpq
from lpq.core import PrecisionWarning
from lpq.optim import MasterWeights

FORMATS = ["fp8", "fp8(scaling=row)", "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4", "nvfp4(rht=true)"]
EVERY = pytest.mark.parametrize("text", [*FORMATS, "identity", "hybrid(row=mxfp8, col=nvfp4)"])


def weights() -> Tensor:
    """Two matrices of very different sizes, so that a value of both would be noticed."""
    torch.manual_seed(0)
    return torch.randn(2, 48, 40) * torch.tensor([1.0, 100.0])[:, None, None]


def alike(a: lpq.QuantizedTensor, b: lpq.QuantizedTensor) -> bool:
    both = zip(a.operands, b.operands, strict=True)
    pairs = [pair for (_, p), (_, q) in both for pair in zip(p.tensors(), q.tensors(), strict=True)]
    return all(x.dtype == y.dtype and torch.equal(x.float(), y.float()) for x, y in pairs)


@EVERY
def test_it_is_cut_and_joined_between_matrices(text: str) -> None:
    stack = lpq.quantizer(text).quantize(weights(), stack=True)
    first, second = stack.chunk(2)
    assert alike(torch.cat([first, second]), stack)
    assert alike(stack.view(-1)[48 * 40 :].view(1, 48, 40)[0], stack[1])
    assert alike(stack.detach().clone().to("cpu"), stack)
    with pytest.warns(PrecisionWarning, match="no form on the buffers"):
        assert torch.equal(stack.narrow(1, 0, 16), stack.dequantize()[:, :16])


@EVERY
def test_what_is_written_to_a_matrix_is_written_to_the_stack(text: str) -> None:
    quantizer, x = lpq.quantizer(text), weights()
    stack = quantizer.quantize(x, stack=True)
    stack[1].copy_(x[0])
    assert alike(stack[1], quantizer.quantize(x[0]))
    stack[0:1].zero_()
    assert not stack[0].dequantize().any()
    assert stack[1].dequantize().any()
    stack.copy_(x)
    assert alike(stack, quantizer.quantize(x, stack=True))


@EVERY
def test_an_optimizer_steps_it_and_a_file_holds_it(text: str) -> None:
    stack = torch.nn.Parameter(lpq.quantizer(text).quantize(weights(), stack=True))
    stack.grad = torch.ones(2, 48, 40)
    before = stack.dequantize()
    MasterWeights(torch.optim.SGD([stack], lr=0.5), keep=False).step()
    assert alike(stack, lpq.quantizer(text).quantize(before - 0.5, stack=True))
    file = io.BytesIO()
    torch.save({"w": stack.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert loaded.shape == (2, 48, 40)
    assert alike(loaded, stack)
    assert alike(copy.deepcopy(stack), stack)


def test_what_a_stack_cannot_be_given_is_refused() -> None:
    x, quantizer = weights(), lpq.quantizer("fp8")
    with pytest.raises(ValueError, match=r"\[48, 40\]"):
        quantizer.quantize(x[0], stack=True)
    with pytest.raises(ValueError, match="remembers statistics"):
        lpq.quantizer("fp8(scaling=delayed)").quantize(x, stack=True)
    with pytest.raises(TypeError, match=r"int64 of shape \[2\]"):
        quantizer.quantize(x, stack=True, seed=3)
