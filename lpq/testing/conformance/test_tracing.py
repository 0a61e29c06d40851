"""Shapes without numbers, and graphs: meta and fake tensors, ``torch.library.opcheck``, ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lpq.core import QuantizedTensor, Quantizer, operations
from lpq.core.operations import declared, shared
from lpq.testing.expect import same
from lpq.testing.operands import DIRECTIONS, SEED, encode, normal, sides
from lpq.testing.options import Family, only

CHECKS = ("test_autograd_registration", "test_faketensor")


def described(tensor: QuantizedTensor) -> dict[str, Any]:
    """Everything about a quantized tensor but its numbers."""
    buffers = {
        f"{direction}.{name}": (buffer.dtype, tuple(buffer.shape))
        for direction, operand in tensor.operands
        for name, buffer in operand.buffers().items()
    }
    return {"tensor": (tensor.dtype, tuple(tensor.shape)), **buffers}


@pytest.mark.parametrize("shape", [(5, 40), (0, 32), (64, 128)], ids=str)
def test_meta_and_fake_tensors(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """Without numbers everything has the dtypes and shapes that it has with them."""
    real = quantizer.quantize(normal(*shape, dtype=torch.bfloat16), seed=SEED)
    meta = quantizer.quantize(torch.empty(shape, dtype=torch.bfloat16, device="meta"), seed=SEED)
    assert meta.device.type == "meta"
    assert described(meta) == described(real)
    assert meta.dequantize().shape == real.shape
    with FakeTensorMode():
        fake = quantizer.quantize(torch.empty(shape, dtype=torch.bfloat16), seed=SEED)
        assert described(fake) == described(real)
        assert fake.dequantize().dtype == torch.bfloat16


@only(
    lambda quantizer: not all(side.plain for side in sides(quantizer)),
    "has operators: an ordinary matrix needs none",
)
def test_operators_pass_opcheck(quantizer: Quantizer) -> None:
    """Schemas, autograd registration and fake results of measure, quantize, decode, transpose and gemm."""
    x = normal(32, 48, torch.bfloat16)
    row, col = (None if s.plain else s for s in (quantizer.side("row"), quantizer.side("col")))
    texts = [side.text if side is not None else "" for side in (row, col)]
    seed = torch.tensor(SEED)
    if declared(row, col):
        opcheck("measure", x, *texts)
    stats = operations.measure_reference(x, row, col)
    opcheck("quantize", x, stats, *texts, seed, 0, False)
    opcheck("quantize", x, [], *texts, seed, 0, True)
    for side in (row, col) if not shared(row, col) else (row,):
        if side is None:
            continue
        operand = encode(side, x)
        buffers = operand.tensors()
        opcheck("decode", buffers, side.text, operand.shape, x.dtype, torch.bfloat16)
        if side.transposable:
            opcheck("transpose", buffers, side.text, operand.shape, x.dtype)
        bias = torch.zeros(32)
        opcheck(
            "gemm",
            buffers,
            buffers,
            bias,
            side.text,
            side.text,
            operand.shape,
            operand.shape,
            x.dtype,
            x.dtype,
            x.dtype,
        )


def opcheck(name: str, *args: Any) -> None:
    op = getattr(torch.ops.lpq, name).default
    given = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor)]
    before = [t.clone() for t in given]
    made = torch.utils._pytree.tree_leaves(op(*args))
    for tensor, copy in zip(given, before, strict=True):
        same(tensor, copy, f"lpq::{name} changed an input")
    storages = [t.untyped_storage().data_ptr() for t in (*given, *made) if t.numel()]
    assert len(set(storages[-len(made) :])) == len(made), f"lpq::{name} returns a buffer twice"
    assert not set(storages[: len(given)]) & set(storages[-len(made) :]), f"lpq::{name} returns a view of an input"
    # torch checks inputs by allclose, which has no 8-bit floats: there the lines above stand in for it.
    wide = all(t.element_size() > 1 or not t.is_floating_point() for t in given)
    torch.library.opcheck(op, args, test_utils=("test_schema", *CHECKS) if wide else CHECKS)


def test_compile_without_a_break(family: Family) -> None:
    """Quantizing and decoding by every option make one graph, which gives the bits of eager execution."""
    x = normal(32, 48, torch.bfloat16)

    def round_trips(x: Tensor) -> list[Tensor]:
        tensors = [
            quantizer.quantize(x, row=direction == "row", col=direction == "col", seed=SEED)
            for quantizer in family.quantizers
            for direction in DIRECTIONS
        ]
        return [tensor.dequantize() for tensor in tensors]

    torch._dynamo.reset()
    compiled = torch.compile(round_trips, fullgraph=True, backend="aot_eager")(x)
    names = [f"{quantizer}: the {direction} operand" for quantizer in family.quantizers for direction in DIRECTIONS]
    for name, traced, eager in zip(names, compiled, round_trips(x), strict=True):
        same(traced, eager, f"{name}, compiled and not")
