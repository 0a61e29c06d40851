"""Assigning encodes again: the tensor then holds what quantizing the new values gives; and so after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lpq.formats import Quantizer
from lpq.operations.derived_operands import rounds_stochastically
from lpq.optim import MasterWeights
from lpq.testing.conformance.test_aten import QUIET
from lpq.testing.conformance.test_tensor import EACH_CHOICE, quantized
from lpq.testing.expect import memory, plain, relative_error, same_quantized
from lpq.testing.operands import normal, rotated
from lpq.torch_private.operators import copy_each
from lpq.torch_private.tensors import version_of

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda t, x: t.copy_(x),
    "fill_": lambda t, x: t.fill_(0.5),
    "zero_": lambda t, x: t.zero_(),
    "mul(out=)": lambda t, x: torch.mul(x, 0.75, out=t),
    "mul(out=) of itself": lambda t, x: torch.mul(t, 3, out=t),
    "copy_each": lambda t, x: copy_each([t], [x]),
}


@EACH_CHOICE
@QUIET
def test_writes_encode_again(quantizer: Quantizer, choice: str) -> None:
    """The tensor holds the operands of the written values; the tensor and its buffers stay the same objects."""
    start, x = quantized(quantizer, choice), normal(32, 48, seed=2)
    for name, write in WRITES.items():
        what = f"{name} of {quantizer} ({choice})"
        tensor, values = start.clone(), start.dequantize()
        write(values, x)
        before, version = memory(tensor), version_of(tensor)
        write(tensor, x)
        assert version_of(tensor) > version, f"{what} is a write that autograd does not count"
        assert memory(tensor) == before, (
            f"{what} replaced the buffers: who refers to them misses the write; it must write into them"
        )
        expected = quantizer.quantize(values, row=choice != "col", col=choice != "row")
        if rounds_stochastically(quantizer):  # the seed is torch's to draw
            error, allowed = relative_error(plain(tensor), values), relative_error(plain(expected), values)
            assert error <= 2 * allowed + 0.05, (
                f"{what}: what was written is off by {error:.3f}; encoding it anew by {allowed:.3f}, and twice that is "
                "allowed: encode what is written as any other matrix"
            )
        else:
            same_quantized(tensor, expected, what)


@QUIET
def test_optimizers_step(quantizer: Quantizer) -> None:
    """SGD and AdamW, for-each and not, through ``MasterWeights`` without masters, move a quantized parameter as they
    move the decoded one; a step rounds once."""
    for make in (
        lambda p: torch.optim.SGD([p], lr=0.5, foreach=False),
        lambda p: torch.optim.SGD([p], lr=0.5, momentum=0.9, foreach=True),
        lambda p: torch.optim.AdamW([p], lr=0.5, weight_decay=0.1, foreach=False),
        lambda p: torch.optim.AdamW([p], lr=0.5, weight_decay=0.1, foreach=True),
    ):
        start, gradient = quantized(quantizer, "both"), normal(32, 48, seed=3)
        weight = torch.nn.Parameter(start.clone())
        decoded = torch.nn.Parameter(start.dequantize())
        for parameter in (weight, decoded):
            parameter.grad = gradient.clone()
        MasterWeights(make(weight), keep=False).step()
        make(decoded).step()
        expected = quantizer.quantize(decoded.detach())
        if rounds_stochastically(quantizer) or rotated(quantizer):
            error = relative_error(plain(weight.detach()), decoded.detach())
            assert error < 0.5, (
                f"{quantizer}: after a step of {type(make(decoded)).__name__} the quantized weight is off by "
                f"{error:.3f} of the one that the same step moved in fp32; below 0.5 is rounding: encode what is "
                "written as any other matrix"
            )
        else:
            same_quantized(weight.detach(), expected, f"{quantizer}: a step of {type(make(decoded)).__name__}")
