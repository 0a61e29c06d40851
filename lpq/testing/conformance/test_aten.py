"""PyTorch's operators give what they give on the decoded tensor, and the result is quantized where it can be.

They are the operators that FSDP2, distributed checkpoints, optimizers and autograd call; each is tried on a
tensor that holds its row operand only, its column operand only, and both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.operations import decode
from lpq.tensor import PrecisionWarning, QuantizedTensor
from lpq.testing.conformance.test_tensor import EACH_CHOICE, quantized
from lpq.testing.expect import equal, memory, plain, quantized_still, same_quantized, same_values
from lpq.testing.operands import cut, no_parts, normal, rotated, sides
from lpq.testing.options import only

QUIET = pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")

VIEWS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "detach": lambda t, m, k: t.detach(),
    "view": lambda t, m, k: t.view(2, m, 2 * k),
    "view as itself": lambda t, m, k: t.view(2 * m, -1),
    "flatten": lambda t, m, k: t.view(-1),
    "flatten and back": lambda t, m, k: t.view(-1).view(2 * m, 2 * k),
    "as_strided": lambda t, m, k: t.as_strided((2 * m, 2 * k), (2 * k, 1), 0),
    "as_strided part": lambda t, m, k: t.as_strided((m, 2 * k), (2 * k, 1), m * 2 * k),
    "unsqueeze": lambda t, m, k: t.unsqueeze(0),
    "slice": lambda t, m, k: t[m:],
    "slice from the end": lambda t, m, k: t[-m:],
    "empty slice": lambda t, m, k: t[m:m],
    "slice of a flattened tensor": lambda t, m, k: t.view(-1)[m * 2 * k :],
    "slice of a 3-D tensor": lambda t, m, k: t.view(2, m, 2 * k)[1:],
    "slice columns": lambda t, m, k: t[:, k:],
    "narrow": lambda t, m, k: t.narrow(0, 0, m),
    "chunk": lambda t, m, k: torch.chunk(t, 2)[1],
    "split": lambda t, m, k: torch.split(t, m)[0],
    "split_with_sizes": lambda t, m, k: torch.split(t, [k, k], dim=1)[1],
    "clone": lambda t, m, k: t.clone(),
    "cat": lambda t, m, k: torch.cat([t[:m], t[m:]]),
}
"""Operations that buffers can express, on a tensor ``[2m, 2k]`` cut at whole blocks: the result is quantized."""
COPIES = ("clone", "cat")
"""Operations whose result has memory of its own; the others give views of the buffers."""
OF_ROWS = (
    "as_strided part", "slice", "slice from the end", "empty slice", "slice of a flattened tensor",
    "slice of a 3-D tensor", "narrow", "chunk", "split", "cat",
)  # fmt: skip
CUTS = {**dict.fromkeys(OF_ROWS, 0), **dict.fromkeys(("slice columns", "split_with_sizes"), 1)}
"""The dimension along which each operator cuts the tensor."""

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda t: t[3],
    "index": lambda t: t[torch.tensor([5, 1])],
    "step": lambda t: t[::3],
    "odd slice": lambda t: t[3:7, 1:6],
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ torch.ones(t.shape[1], 8),
    "sum": lambda t: t.sum(0),
    "reshape": lambda t: t.reshape(t.shape[0] // 2, -1),
    "where": lambda t: torch.where(t > 0, t, 0),
    "isfinite": lambda t: t.isfinite(),
    "float64": lambda t: t.double(),
    "zeros_like": lambda t: torch.zeros_like(t),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "stack": lambda t: torch.stack([t, t]),
}
"""Operations that need the numbers: the result is mostly an ordinary tensor."""


@EACH_CHOICE
@QUIET
def test_views_stay_quantized(quantizer: Quantizer, choice: str) -> None:
    """Views and copies on whole blocks are quantized, say nothing of decoding, and stand for what they must; views
    share the memory of the buffers."""
    rows, cols = cut(quantizer)
    tensor = quantized(quantizer, choice, 2 * rows, 2 * cols)
    decoded = tensor.dequantize()
    for name, op in VIEWS.items():
        what = f"{name} of {quantizer} ({choice})"
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always", PrecisionWarning)
            result = op(tensor, rows, cols)
        directions = [d for d, _ in tensor.operands]
        if name in CUTS and no_parts(quantizer, CUTS[name], directions):
            assert not isinstance(result, QuantizedTensor), (
                f"{what} made a part of what has none; it must decode: leave narrow and cat as Storage has them"
            )
        else:
            assert isinstance(result, QuantizedTensor), (
                f"{what} decoded the tensor; on whole blocks its buffers can be viewed, and it must stay quantized"
            )
            equal([d for d, _ in result.operands], directions, f"{what}: the operands that it holds")
            equal([str(one.message) for one in records], [], f"{what}: what was said of decoding")
            shared = storages(result) <= storages(tensor)
            equal(shared, name not in COPIES, f"{what}: whether it shares the memory of the buffers")
        same_values(result, op(decoded, rows, cols), what, exact=not rotated(quantizer))


def storages(tensor: QuantizedTensor) -> set[int]:
    """Where the memory of each buffer of a tensor begins."""
    return {b.untyped_storage().data_ptr() for _, operand in tensor.operands for b in operand.tensors()}


@EACH_CHOICE
@QUIET
def test_reads_decode(quantizer: Quantizer, choice: str) -> None:
    """Everything else gives exactly what it gives on the decoded tensor."""
    tensor = quantized(quantizer, choice)
    decoded = tensor.dequantize()
    for name, op in READS.items():
        result = op(tensor)
        exact = not rotated(quantizer) or not isinstance(result, QuantizedTensor)
        same_values(result, op(decoded), f"{name} of {quantizer} ({choice})", exact=exact)


@EACH_CHOICE
@QUIET
def test_transposed_tensors(quantizer: Quantizer, choice: str) -> None:
    """``t()`` and ``transpose`` swap the operands, where one quantizer describes the transposed tensor."""
    tensor = quantized(quantizer, choice)
    expected = tensor.dequantize().t()
    if quantizer.flipped() is not None and tensor.col is not None:  # then this is the row operand, which is decoded
        expected = decode(tensor.col, tensor.dtype)
    for flipped in (tensor.t(), tensor.transpose(0, 1), tensor.transpose(-1, -2)):
        same_values(flipped, expected, f"{quantizer} ({choice}): t()")
        if quantizer.flipped() is not None:
            what = f"{quantizer} ({choice}): t() (flipped() names its quantizer; None is right where there is none)"
            directions = {d for d, _ in quantized_still(flipped, what).operands}
            equal(
                directions,
                {{"row": "col", "col": "row"}[d] for d, _ in tensor.operands},
                f"{what}: the operands it holds",
            )
            same_quantized(flipped.t(), tensor, f"{quantizer} ({choice}): t().t()")
    same_values(tensor.transpose(0, 0), tensor, f"{quantizer} ({choice}): transpose(0, 0)")


@EACH_CHOICE
def test_making_new_tensors(quantizer: Quantizer, choice: str) -> None:
    """``empty_like``, ``new_empty`` and ``new_zeros`` are quantized alike; ``zero_`` works in place."""
    tensor = quantized(quantizer, choice)
    tensors: dict[str, Any] = {
        "empty_like": torch.empty_like(tensor),
        "new_empty": tensor.new_empty((16, 48)),
        "new_zeros": tensor.new_zeros((64, 48)),
        "new_zeros of 0 rows": tensor.new_zeros((0, 48)),
    }
    for name, result in tensors.items():
        what = f"{name} of {quantizer}"
        directions = [d for d, _ in quantized_still(result, what).operands]
        equal(directions, [d for d, _ in tensor.operands], f"{what}: the operands that it holds")
        equal(result.dtype, tensor.dtype, what)
    zeros = tensors["new_zeros"]
    same_values(zeros, torch.zeros(64, 48), f"{quantizer}: new_zeros", exact=not rotated(quantizer))
    before = memory(tensor)
    assert tensor.zero_() is tensor, f"{quantizer}: zero_ returned another tensor; it must write in place"
    assert memory(tensor) == before, f"{quantizer}: zero_ replaced the buffers; it must write into them"
    assert (tensor.dequantize() == 0).all(), (
        f"{quantizer}: zero_ leaves {tensor.dequantize().abs().max().item():g}; it must leave 0: give 0 a code of "
        "its own"
    )


@EACH_CHOICE
def test_copying_between_tensors(quantizer: Quantizer, choice: str) -> None:
    """``copy_``: quantized to quantized moves bytes, to quantized encodes, from quantized decodes."""
    target, source = quantized(quantizer, choice), quantized(quantizer, choice, seed=1)
    same_quantized(target.copy_(source), source, f"{quantizer} ({choice}): copy_ from a quantized tensor")
    ordinary = torch.empty(32, 48).copy_(source)
    same_values(ordinary, source.dequantize(), f"{quantizer} ({choice}): copy_ to an ordinary tensor")


@only(lambda q: all(side.plain for side in sides(q)) is False, "loses precision: an ordinary matrix loses none")
@QUIET
def test_decoding_is_said(quantizer: Quantizer) -> None:
    """An operator that the buffers cannot express warns: no precision is lost or gained in silence."""
    tensor = quantized(quantizer, "both")
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        plain(tensor + normal(32, 48))
    assert any(issubclass(w.category, PrecisionWarning) for w in records), (
        f"{quantizer}: t + x decodes and gives no PrecisionWarning; it must: leave operators to QuantizedTensor"
    )
