"""Encoding is a pure function of the numbers: it writes to nothing that it is given, whatever these are, and gives the
same bytes for the same numbers, however they lie in memory, whatever dtype holds them, and whatever is encoded next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.formats import Quantizer, Storage
from lpq.testing.expect import same, same_operand
from lpq.testing.operands import encode, measure, normal
from lpq.testing.options import only
from lpq.testing.table import DTYPES, EXPANDED, LAID, cases, in_views
from lpq.torch_private.tensors import version_of

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x * 0,
    "a NaN": lambda x: with_one(x, torch.nan),
    "an infinity": lambda x: with_one(x, torch.inf),
}
"""Matrices that a format may treat in its own way, beside the table's matrices."""
SECOND = "encoding the same matrix a second time (it may be random only by the bits that encode_stochastic is given)"


def with_one(x: Tensor, value: float) -> Tensor:
    """A copy of a matrix with one such value in it."""
    copy = x.clone()
    copy[-2, -3] = value
    return copy


def untouched(tensors: Mapping[str, Tensor], function: Callable[[], Any], what: str) -> Any:
    """Return the result of a function that may not write to these tensors, not even the values that they have."""
    before = {name: (tensor.clone(), version_of(tensor)) for name, tensor in tensors.items()}
    result = function()
    for name, (copy, version) in before.items():
        same(
            tensors[name], copy, f"{what} changed {name}; compute with a copy of it, as x.clamp(…) and not x.clamp_(…)"
        )
        assert version_of(tensors[name]) == version, (
            f"{what} writes to {name}, here what stood there already; it must not: compute with a copy of it, as "
            "x.clamp(…) and not x.clamp_(…)"
        )
    return result


def results(side: Quantizer, x: Tensor, what: str) -> dict[str, Tensor]:
    """All results of a format for a matrix, by a name for messages; none of its methods may write to its arguments."""
    stats: dict[str, Tensor] = untouched({"its input": x}, partial(measure, side, x), f"{what}: measure")
    inputs = {"its input": x} | {f"the statistic {name!r}": tensor for name, tensor in stats.items()}
    operand: Storage = untouched(inputs, partial(encode, side, x, stats), f"{what}: encode")
    buffers = {f"the buffer {name!r}": tensor for name, tensor in operand.buffers().items()}
    tensors = inputs | buffers | {"what decode returned": untouched(buffers, operand.decode, f"{what}: decode")}
    if side.transposable:
        transpose: Storage = untouched(buffers, operand.transposed, f"{what}: transposed")
        transposes = {f"the buffer {name!r} of the transpose": getattr(transpose, name) for name in side.names}
        tensors |= transposes
    del tensors["its input"]
    return tensors


def test_encode_is_pure(side: Quantizer) -> None:
    """The same bytes twice, with another matrix encoded in between, whose results lie elsewhere; matrix, statistics and
    buffers untouched, for numbers of every kind; torch's generator too."""
    generator = torch.get_rng_state()
    for case in cases(side):
        x, y = case.matrix(), case.matrix(seed=1)
        what = f"{side}, {case}"
        first = results(side, x, what)
        copies = {name: tensor.clone() for name, tensor in first.items()}
        results(side, y, what)
        for name, copy in copies.items():
            same(
                first[name], copy,
                f"{what}: {name} changed when another matrix was encoded; make it in new memory, and keep none",
            )  # fmt: skip
        again = results(side, x, what)
        for name, copy in copies.items():
            same(again[name], copy, f"{what}: {SECOND}, {name}")
    for dtype in DTYPES:
        for kind, make in KINDS.items():
            x, what = make(normal(24, 72, dtype)), f"{side}, {kind} in {dtype}"
            first = results(side, x, what)
            for name, tensor in results(side, x, what).items():
                same(tensor, first[name], f"{what}: {SECOND}, {name}")
    assert torch.equal(torch.get_rng_state(), generator), (
        f"{side}: encode draws from torch's generator; it must not: say stochastic = True and take the bits that "
        "encode_stochastic is given"
    )


def test_strides_do_not_matter(side: Quantizer) -> None:
    """A transposed view, of which every column operand is made, and others: rows and columns that lie apart, parts that
    are repeated without a copy, and an odd place in memory. A buffer may be a view as well."""
    for case in cases(side):
        x, what = case.matrix(), f"{side}, {case}"
        reference = encode(side, x)
        for laid in dict.fromkeys((case.laid, "transposed")):
            if laid != "contiguous":
                how = f"{what}: encoding the same values from a view ({laid}), beside a copy of it"
                same_operand(encode(side, LAID[laid](x)), reference, how)
        same(in_views(reference).decode(), reference.decode(), f"{what}: decoding buffers that are transposed views")
    for laid, expand in EXPANDED.items():
        expanded = expand(normal(24, 72))
        for x, way in ((expanded, ""), (expanded.t(), ", transposed")):
            how = f"{side}: encoding an expanded view ({laid}{way}), beside a copy of it"
            same_operand(encode(side, x), encode(side, x.clone(memory_format=torch.contiguous_format)), how)


def test_the_default_dtype_does_not_matter(side: Quantizer) -> None:
    """With ``torch.set_default_dtype``, as models are made in bf16, a format does what it does without."""
    for case in (case for case in cases(side) if case.default):
        x, what = case.matrix(), f"{side}, {case} (give each new tensor its dtype)"
        reference = encode(side, x)
        decoded = reference.decode()
        with case.default_dtype():
            operand = encode(side, x)
            same_operand(operand, reference, what)
            same(operand.decode(), decoded, f"{what}, decoded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@only(lambda side: not side.plain, "encodes: an ordinary matrix keeps the dtype that it has")
def test_the_same_numbers_give_the_same_bytes(side: Quantizer, dtype: torch.dtype) -> None:
    """In fp16 and bf16 as in fp32, for numbers that these dtypes hold, down to the least: everything is computed in
    fp32."""
    for case in (case for case in cases(side) if case.dtype == dtype):
        x = case.matrix()
        operand, reference = encode(side, x), encode(side, x.float())
        what = f"{side}, {case}, beside the same numbers in torch.float32 (compute in fp32, with x.float())"
        for buffer in side.layout:
            if buffer.dtype is not None:
                same(
                    operand.buffers()[buffer.name], reference.buffers()[buffer.name], f"{what}, buffer {buffer.name!r}"
                )
        same(operand.decode(), reference.decode(), f"{what}, decoded")
