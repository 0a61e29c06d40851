"""PyTorch's operators on a quantized tensor give what they give on the decoded tensor, and stay quantized where they can.

They are the operators that FSDP2, distributed checkpoints, optimizers and autograd call; each is tried on a tensor that
holds its row operand only, its column operand only, and both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.core import PrecisionWarning, QuantizedTensor, Quantizer
from lpq.testing.conformance.test_tensor import HELD, quantized
from lpq.testing.expect import plain, same_quantized, same_values
from lpq.testing.operands import normal, rotated, sides
from lpq.testing.options import only

ROWS, COLS = 256, 256  # whole blocks of 128

QUIET = pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(2, ROWS // 2, COLS),
    "view as itself": lambda t: t.view(ROWS, -1),
    "flatten": lambda t: t.view(-1),
    "flatten and back": lambda t: t.view(-1).view(ROWS, COLS),
    "as_strided": lambda t: t.as_strided((ROWS, COLS), (COLS, 1), 0),
    "slice": lambda t: t[128:],
    "slice columns": lambda t: t[:, 128:],
    "narrow": lambda t: t.narrow(0, 0, 128),
    "as_strided part": lambda t: t.as_strided((128, COLS), (COLS, 1), 128 * COLS),
    "chunk": lambda t: torch.chunk(t, 2)[1],
    "split": lambda t: torch.split(t, 128)[0],
    "split_with_sizes": lambda t: torch.split(t, [128, 128], dim=1)[1],
    "clone": lambda t: t.clone(),
    "cat": lambda t: torch.cat([t[:128], t[128:]]),
}
"""What the buffers can express, so that the result is quantized."""

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda t: t[3],
    "index": lambda t: t[torch.tensor([5, 1])],
    "step": lambda t: t[::3],
    "odd slice": lambda t: t[3:40, 1:30],
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ t.t(),
    "sum": lambda t: t.sum(0),
    "reshape": lambda t: t.reshape(COLS // 2, 2 * ROWS),
    "where": lambda t: torch.where(t > 0, t, 0),
    "isfinite": lambda t: t.isfinite(),
    "float64": lambda t: t.double(),
    "zeros_like": lambda t: torch.zeros_like(t),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "stack": lambda t: torch.stack([t, t]),
}
"""What needs the numbers, so that the result is an ordinary tensor."""


@HELD
@QUIET
@pytest.mark.parametrize("op", VIEWS)
def test_views_stay_quantized(quantizer: Quantizer, held: str, op: str) -> None:
    """Views and copies on whole blocks are quantized and stand for what they must."""
    tensor = quantized(quantizer, held, ROWS, COLS)
    result = VIEWS[op](tensor)
    assert isinstance(result, QuantizedTensor), f"{op} of {quantizer} ({held}) decoded the tensor"
    assert [d for d, _ in result.operands] == [d for d, _ in tensor.operands]
    same_values(result, VIEWS[op](tensor.dequantize()), f"{op} of {quantizer} ({held})", exact=not rotated(quantizer))


@HELD
@QUIET
@pytest.mark.parametrize("op", READS)
def test_reads_decode(quantizer: Quantizer, held: str, op: str) -> None:
    """Everything else gives exactly what it gives on the decoded tensor."""
    tensor = quantized(quantizer, held, ROWS, COLS)
    result = READS[op](tensor)
    exact = not rotated(quantizer) or not isinstance(result, QuantizedTensor)
    same_values(result, READS[op](tensor.dequantize()), f"{op} of {quantizer} ({held})", exact=exact)


@HELD
@QUIET
def test_transposed_tensors(quantizer: Quantizer, held: str) -> None:
    """``t()`` and ``transpose`` swap the operands, where the quantizer of the transposed tensor can be named."""
    tensor = quantized(quantizer, held)
    for flipped in (tensor.t(), tensor.transpose(0, 1), tensor.transpose(-1, -2)):
        same_values(flipped, tensor.dequantize().t(), f"{quantizer} ({held}): t()")
        if quantizer.flipped() is not None:
            assert isinstance(flipped, QuantizedTensor)
            swapped = {"row": "col", "col": "row", "both": "both"}[held]
            same_values(flipped.t(), tensor, f"{quantizer} ({held}): t().t()")
            assert [d for d, _ in flipped.operands] == [d for d, _ in quantized(quantizer, swapped).operands]
    same_values(tensor.transpose(0, 0), tensor, f"{quantizer} ({held}): transpose(0, 0)")


@HELD
def test_making_new_tensors(quantizer: Quantizer, held: str) -> None:
    """``empty_like`` and ``new_empty`` are quantized like it; ``new_zeros`` and ``zero_`` are zeros, in place or new."""
    tensor = quantized(quantizer, held)
    made: dict[str, Any] = {
        "empty_like": torch.empty_like(tensor),
        "new_empty": tensor.new_empty((16, 48)),
        "new_zeros": tensor.new_zeros((16, 48)),
        "new_zeros of 0 rows": tensor.new_zeros((0, 48)),
    }
    for name, result in made.items():
        assert isinstance(result, QuantizedTensor), f"{name} of {quantizer} is an ordinary tensor"
        assert [d for d, _ in result.operands] == [d for d, _ in tensor.operands]
        assert result.dtype == tensor.dtype
    zeros = made["new_zeros"]
    same_values(zeros + 0, torch.zeros(16, 48), f"{quantizer}: new_zeros", exact=not rotated(quantizer))
    pointers = [b.data_ptr() for _, operand in tensor.operands for b in operand.tensors()]
    assert tensor.zero_() is tensor
    assert pointers == [b.data_ptr() for _, operand in tensor.operands for b in operand.tensors()]
    assert (tensor.dequantize() == 0).all(), f"{quantizer}: zero_ leaves {tensor.dequantize().abs().max().item()}"


@HELD
def test_copying_between_tensors(quantizer: Quantizer, held: str) -> None:
    """``copy_``: quantized to quantized moves bytes, to quantized encodes, from quantized decodes."""
    target, source = quantized(quantizer, held), quantized(quantizer, held, seed=1)
    same_quantized(target.copy_(source), source, f"{quantizer} ({held}): copy_ from a quantized tensor")
    ordinary = torch.empty(32, 48).copy_(source)
    same_values(ordinary, source.dequantize(), f"{quantizer} ({held}): copy_ to an ordinary tensor")


@only(lambda q: all(side.plain for side in sides(q)) is False, "loses precision: an ordinary matrix loses none")
@QUIET
def test_decoding_is_said(quantizer: Quantizer) -> None:
    """An operator that the buffers cannot express says so: no precision is lost or gained in silence."""
    tensor = quantized(quantizer, "both")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain(tensor + normal(32, 48))
    assert any(issubclass(w.category, PrecisionWarning) for w in caught), f"{quantizer}: t + x said nothing"
