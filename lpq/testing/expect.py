"""Comparisons that report differences in words. Bits count: a NaN equals itself, and 0.0 is not -0.0."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from lpq.formats import Storage
from lpq.tensor import QuantizedTensor

T = TypeVar("T")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Both tensors have the same dtype, shape and bits."""
    assert actual.dtype == expected.dtype, f"{what}: it is {actual.dtype} and must be {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: it is {list(actual.shape)} and must be {list(expected.shape)}"
    one, other = (t.detach().contiguous().view(_INTEGERS[t.element_size()]) for t in (actual, expected))
    differing = (one != other).nonzero()
    if len(differing):
        at = tuple(differing[0].tolist())
        raise AssertionError(
            f"{what}: {len(differing)} of {actual.numel()} elements differ, first at {list(at)}: "
            f"it is {value(actual[at])} and must be {value(expected[at])}"
        )


def equal(actual: object, expected: object, what: str) -> None:
    """Both are equal: shapes, dtypes, names."""
    assert actual == expected, f"{what}: it is {actual} and must be {expected}"


def there(value: T | None, what: str) -> T:
    """The value, which must not be missing."""
    assert value is not None, f"{what}: it is missing and must be there"
    return value


def quantized_still(tensor: object, what: str) -> QuantizedTensor:
    """The tensor, which must be quantized."""
    assert isinstance(tensor, QuantizedTensor), (
        f"{what}: it is a {type(tensor).__name__}, and must be a QuantizedTensor"
    )
    return tensor


def value(element: Tensor) -> Any:
    return element.float().item() if element.is_floating_point() else element.item()


def same_operand(actual: Storage, expected: Storage, what: str) -> None:
    """Both operands stand for a matrix of the same shape and dtype, and hold the same bytes."""
    own = (tuple(actual.shape), actual.dtype, actual.quantizer)
    reference = (tuple(expected.shape), expected.dtype, expected.quantizer)
    assert own == reference, f"{what}: it stands for {own} and must stand for {reference}"
    for name, tensor in expected.buffers().items():
        same(actual.buffers()[name], tensor, f"{what}, buffer {name!r}")


def same_decoded(actual: Storage, expected: Storage, what: str) -> None:
    """Check that both operands decode to the same numbers. A NaN need only be a NaN: the integer to which it is cast
    may depend on its place."""
    same(one_nan(actual.decode()), one_nan(expected.decode()), f"{what}, decoded")


def one_nan(tensor: Tensor) -> Tensor:
    """The tensor with one NaN in place of every NaN: the bits of a NaN depend on the processor and on its place."""
    return torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor


def same_quantized(actual: Tensor, expected: Tensor, what: str) -> None:
    """Both are quantized tensors that hold the same operands."""
    expected = quantized_still(expected, f"{what}: what is expected")
    actual = quantized_still(actual, what)
    equal(list(actual.shape), list(expected.shape), what)
    equal(actual.dtype, expected.dtype, what)
    directions = [d for d, _ in actual.operands]
    reference = [d for d, _ in expected.operands]
    assert directions == reference, f"{what}: it holds the operands {directions} and must hold {reference}"
    for (direction, one), (_, other) in zip(actual.operands, expected.operands, strict=True):
        same_operand(one, other, f"{what}, {direction} operand")


def memory(tensor: Tensor) -> list[int]:
    """Where each buffer of a quantized tensor lies, if it has elements."""
    tensor = quantized_still(tensor, "what was made")
    return [b.data_ptr() for _, operand in tensor.operands for b in operand.tensors() if b.numel()]


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values of this tensor."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def same_values(actual: Tensor, expected: Tensor, what: str, *, exact: bool = True) -> None:
    """Both stand for the same numbers: bit for bit, or else up to the order of fp32 sums."""
    actual, expected = plain(actual), plain(expected)
    if exact:
        same(actual, expected, what)
    else:
        torch.testing.assert_close(
            actual, expected, rtol=1e-2 if expected.dtype != torch.float32 else 1e-5,
            atol=1e-5 * max(1.0, expected.abs().max().item() if expected.numel() else 0.0),
            equal_nan=True, msg=lambda text: f"{what}: {text}",
        )  # fmt: skip


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The RMS of the difference over the RMS of the expected values; 0 where both are zero."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt()) if difference != 0 else 0.0


def gain(actual: Tensor, expected: Tensor) -> float:
    """How long the actual values are along the expected ones, in lengths of these."""
    return float((actual.double() * expected.double()).sum() / expected.double().square().sum())
