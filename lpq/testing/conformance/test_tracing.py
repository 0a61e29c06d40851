"""Shapes without numbers, and graphs: meta and fake tensors, ``torch.library.opcheck``, ``torch.compile``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq import operations, registry
from lpq.formats import Quantizer
from lpq.formats.format import DIRECTIONS, Direction
from lpq.operations import decode, gemm, transpose
from lpq.tensor import QuantizedTensor
from lpq.testing.expect import equal, same
from lpq.testing.operands import SEED, cut, normal, sides
from lpq.testing.options import Family, only
from lpq.torch_private.compiling import mark_dynamic
from lpq.torch_private.dispatch import FakeTensorMode, TorchDispatchMode
from lpq.torch_private.pytree import tree_leaves

CHECKS = ("test_autograd_registration", "test_faketensor")


def description(tensor: QuantizedTensor) -> dict[str, Any]:
    """Everything about a quantized tensor but its numbers."""
    buffers = {
        f"{direction}.{name}": (buffer.dtype, tuple(buffer.shape), buffer.stride())
        for direction, operand in tensor.operands
        for name, buffer in operand.buffers().items()
    }
    return {"tensor": (tensor.dtype, tuple(tensor.shape)), **buffers}


@pytest.mark.parametrize("shape", [(5, 40), (0, 32), (64, 128)], ids=str)
def test_meta_and_fake_tensors(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """Without numbers everything has the dtypes, shapes and strides that it has with them."""
    real = quantizer.quantize(normal(*shape, dtype=torch.bfloat16), seed=SEED)
    meta = quantizer.quantize(torch.empty(shape, dtype=torch.bfloat16, device="meta"), seed=SEED)
    equal(meta.device.type, "meta", f"{quantizer}: where a meta tensor is encoded to")
    equal(description(meta), description(real), f"{quantizer}: what a meta tensor {list(shape)} is encoded to")
    equal(meta.dequantize().shape, real.shape, f"{quantizer}: a meta tensor, decoded")
    with FakeTensorMode() as mode:
        stand_in: Any = mode.from_tensor(real)
        equal(description(stand_in), description(real), f"{quantizer}: the fake form of a tensor {list(shape)}")
        fake = quantizer.quantize(torch.empty(shape, dtype=torch.bfloat16), seed=SEED)
        equal(description(fake), description(real), f"{quantizer}: what a fake tensor {list(shape)} is encoded to")
        equal(fake.dequantize().dtype, torch.bfloat16, f"{quantizer}: a fake tensor, decoded")


@only(lambda quantizer: not all(side.plain for side in sides(quantizer)), "has an operator to check")
def test_operators_pass_opcheck(quantizer: Quantizer) -> None:
    """Schema, autograd registration and fake results of every operator call that this format leads to."""
    x = normal(32, 48, torch.bfloat16)
    row, col = quantizer.side("row"), quantizer.side("col")
    with Calls() as calls:
        if not (row.plain or col.plain):
            operations.measure(x, row, col)
        tensor = quantizer.quantize(x, seed=SEED, state=quantizer.new_state() or None)
        for _, operand in tensor.operands:
            decode(operand, torch.float32)
            gemm(operand, operand, bias=torch.zeros(operand.shape[0]))
            if operand.quantizer.transposable:
                transpose(operand)
    assert calls.log, f"{quantizer} calls no operator of lpq; it must, or say plain = True if it encodes nothing"
    for op, args in calls.log:
        call = op, *(described_argument(arg) for arg in tree_leaves(args))
        if call not in checked():  # a hybrid makes many a call that its sides make
            opcheck(op, args)
            checked().add(call)


@registry.cached
def checked() -> set[tuple[Any, ...]]:
    """The calls that were checked since plugins changed last."""
    return set()


def described_argument(arg: Any) -> Any:
    """All that tells an argument of an operator from another one."""
    if not isinstance(arg, Tensor):
        return type(arg), arg
    numbers = arg.contiguous().view(-1).view(torch.uint8).tolist()
    return arg.dtype, tuple(arg.shape), arg.stride(), tuple(numbers)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls of lpq's operators that are made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lpq":
            self.log.append((func, args))
        return func(*args, **(kwargs or {}))


def opcheck(op: Any, args: tuple[Any, ...]) -> None:
    arguments = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
    before = [t.clone() for t in arguments]
    results = tree_leaves(op(*args))
    for tensor, copy in zip(arguments, before, strict=True):
        same(tensor, copy, f"{op} changed an input")
    inputs, outputs = ([t.untyped_storage().data_ptr() for t in tensors] for tensors in (arguments, results))
    assert len(set(outputs)) == len(outputs), f"{op} returns one buffer twice; each must have memory of its own"
    assert not set(inputs) & set(outputs), f"{op} returns a view of an input; what it returns must be new"
    # torch checks inputs by allclose, which has no 8-bit floats: there the lines above stand in for it.
    wide = all(t.element_size() > 1 or not t.is_floating_point() for t in arguments)
    torch.library.opcheck(op, args, test_utils=("test_schema", *CHECKS) if wide else CHECKS)


def test_compile_without_a_break(family: Family) -> None:
    """Quantizing and decoding by every option make one graph, for any number of rows and columns that a compiler has
    left open, and it gives the bits of eager execution."""
    rows, cols = (math.lcm(*sizes) for sizes in zip(*map(cut, family.quantizers), strict=True))
    shapes = ((rows + 32, cols + 16), (2 * rows + 7, 3 * cols + 5))
    x, other = (normal(*shape, dtype=torch.bfloat16) for shape in shapes)

    ways: dict[Any, tuple[Quantizer, Direction]] = {}  # each operand once, whatever else its tensor has
    for quantizer in family.quantizers:
        for direction in DIRECTIONS:
            source = quantizer.side("row") if direction == "col" and quantizer.col_source == "row" else None
            ways.setdefault((direction, quantizer.side(direction), source), (quantizer, direction))

    def round_trips(x: Tensor) -> list[Tensor]:
        tensors = [
            quantizer.quantize(x, row=direction == "row", col=direction == "col", seed=SEED)
            for quantizer, direction in ways.values()
        ]
        return [tensor.dequantize() for tensor in tensors]

    torch.compiler.reset()
    for dim in (0, 1):
        mark_dynamic(x, dim)  # and an error if a size in the graph equals a size of x
    compiled = torch.compile(round_trips, fullgraph=True, backend="aot_eager")
    names = [f"{quantizer}: the {direction} operand" for quantizer, direction in ways.values()]
    for matrix, how in ((x, "compiled"), (other, "compiled for another shape")):
        for name, traced, eager in zip(names, compiled(matrix), round_trips(matrix), strict=True):
            same(traced, eager, f"{name} of {list(matrix.shape)}, {how}, beside eager execution")
