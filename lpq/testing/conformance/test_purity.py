"""Encoding is a pure function of the numbers: it writes to nothing that it is given, whatever these are, and gives the
same bytes for the same numbers, however they lie in memory and whatever dtype holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.testing.expect import same, same_operand
from lpq.testing.operands import encode, measure, normal
from lpq.testing.options import only
from lpq.torch_private.tensors import version_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal values": lambda x: x,
    "zeros": lambda x: x * 0,
    "a NaN": lambda x: _with(x, torch.nan),
    "an infinity": lambda x: _with(x, torch.inf),
    "the largest numbers": lambda x: x.sign() * torch.finfo(x.dtype).max,
    "the least numbers": lambda x: x.sign() * torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps,
}
"""Changes to a matrix of normal values: a format may treat some of the results in its own way."""


def _with(x: Tensor, value: float) -> Tensor:
    made = x.clone()
    made[-2, -3] = value
    return made


def untouched(given: Mapping[str, Tensor], function: Callable[[], Any], what: str) -> Any:
    """Return the result of a function that may not write to these tensors, not even the values that they have."""
    before = {name: (tensor.clone(), version_of(tensor)) for name, tensor in given.items()}
    made = function()
    for name, (copy, version) in before.items():
        same(given[name], copy, f"{what} changed {name}; compute with a copy of it, as x.clamp(…) and not x.clamp_(…)")
        assert version_of(given[name]) == version, (
            f"{what} writes to {name}, here what stood there already; it must not: compute with a copy of it, as "
            "x.clamp(…) and not x.clamp_(…)"
        )
    return made


@DTYPES
def test_encode_is_pure(side: Quantizer, dtype: torch.dtype) -> None:
    """The same bytes twice, matrix, statistics and buffers untouched, for numbers of every kind; torch's "
    "generator too."""
    generator = torch.get_rng_state()
    for kind, made in KINDS.items():
        x = made(normal(24, 72, dtype))
        what = f"{side}, {kind} in {dtype}"
        matrix = {"its input": x}
        stats = untouched(matrix, partial(measure, side, x), f"{what}: measure")
        given = matrix | {f"the statistic {name!r}": tensor for name, tensor in stats.items()}
        first = untouched(given, partial(encode, side, x, stats), f"{what}: encode").map(torch.clone)
        same_operand(encode(side, x, stats), first, f"{what}: encoding the same matrix a second time")
        buffers = {f"the buffer {name!r}": tensor for name, tensor in first.buffers().items()}
        untouched(buffers, first.decode, f"{what}: decode")
        if side.transposable:
            untouched(buffers, first.transposed, f"{what}: transposed")
    assert torch.equal(torch.get_rng_state(), generator), (
        f"{side}: encode draws from torch's generator; it must not: say stochastic = True and take the bits that "
        "encode_stochastic is given"
    )


@DTYPES
def test_strides_do_not_matter(side: Quantizer, dtype: torch.dtype) -> None:
    """Every other row of a transposed view, a row that is repeated without a copy, and an odd place in memory."""
    x = normal(24, 72, dtype)
    strided = torch.empty(72, 48, dtype=dtype).t()[::2].copy_(x)
    same_operand(encode(side, strided), encode(side, x), f"{side}: encoding the same values from a strided view")
    expanded = x[:1].expand(24, 72)
    repeated = encode(side, expanded.contiguous())
    same_operand(encode(side, expanded), repeated, f"{side}: encoding an expanded view")
    offset = torch.empty(1 + x.numel(), dtype=dtype)[1:].view(24, 72).copy_(x)
    same_operand(encode(side, offset), encode(side, x), f"{side}: encoding a view that begins inside of its memory")


@only(lambda side: not side.plain, "encodes: an ordinary matrix keeps the dtype that it has")
def test_the_same_numbers_give_the_same_bytes(side: Quantizer) -> None:
    """In fp16 and bf16 as in fp32, for numbers that these hold: what is computed is computed in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        x = normal(40, 96, dtype)
        operand, wanted = encode(side, x), encode(side, x.float())
        what = f"{side}: numbers in {dtype}, beside the same in torch.float32 (compute in fp32, with x.float())"
        same(operand.decode(), wanted.decode(), f"{what}, decoded")
        for buffer in side.layout:
            if buffer.dtype is not None:
                same(operand.buffers()[buffer.name], wanted.buffers()[buffer.name], f"{what}, buffer {buffer.name!r}")
