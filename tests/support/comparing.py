"""Exact comparison of tensors, of state dicts and of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lpq.core import QuantizedTensor, Storage
from lpq.testing.expect import same


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which tell zeros of either sign and NaNs apart, as a view if it can be."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as they are now."""
    return as_bytes(tensor).clone()


def equal(a: Iterable[Tensor | None], b: Iterable[Tensor | None], *, nan: bool = False) -> bool:
    """True if tensors have the same dtypes, shapes and values, and None is in the same places.

    As many tensors are expected on both sides: other numbers raise, so that ``not equal`` cannot hold by accident.

    Args:
        nan: whether NaN equals NaN
    """
    return all(_equal(p, q, nan) for p, q in zip([*a], [*b], strict=True))


def _equal(a: Tensor | None, b: Tensor | None, nan: bool) -> bool:
    if a is None or b is None:
        return a is b
    if nan and a.is_floating_point() and a.shape == b.shape:
        both = a.isnan() & b.isnan()
        a, b = a.masked_fill(both, 0), b.masked_fill(both, 0)
    return a.dtype == b.dtype and torch.equal(a, b)


def equal_bytes(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """True if tensors have the same dtypes, shapes and bytes. Other numbers of them raise."""
    return all(
        (p.dtype, p.shape) == (q.dtype, q.shape) and torch.equal(as_bytes(p), as_bytes(q))
        for p, q in zip([*a], [*b], strict=True)
    )


def equal_operands(a: Storage, b: Storage) -> bool:
    """True if two operands stand for matrices of one shape and dtype, by the same bytes."""
    one, other = a.buffers(), b.buffers()
    return (tuple(a.shape), a.dtype, [*one]) == (tuple(b.shape), b.dtype, [*other]) and equal_states(one, other)


def equal_quantized(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """True if two tensors have the same shape and dtype, and operands of the same quantizers and bytes."""
    one, other = ([(direction, s.quantizer) for direction, s in t.operands] for t in (a, b))
    alike = (a.shape, a.dtype, one) == (b.shape, b.dtype, other)
    return alike and all(equal_operands(s, t) for (_, s), (_, t) in zip(a.operands, b.operands, strict=True))


def expect_bytes(got: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Fail, in words, if tensors differ in dtype, shape or bytes."""
    for i, (one, other) in enumerate(zip([*got], [*expected], strict=True)):
        same(one, other, f"{what}, output {i}")


def equal_states(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if both have the same names, and under each the same dtype, shape and bytes."""
    return a.keys() == b.keys() and equal_bytes(a.values(), (b[name] for name in a))


def equal_files(a: Path, b: Path) -> bool:
    """True if two folders have the same files, with the same bytes."""
    one, other = ({p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()} for top in (a, b))
    return one == other
