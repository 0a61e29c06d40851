"""The bytes of a gathered weight are those of quantizing the whole weight: every format, and hybrids of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrids import FEW, MIXED
from operands import Side, expected, gathered, side, value
from ranks import fully_shard, spawn
from support.comparing import equal_states
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import lpq
from lpq.core import QuantizedTensor

ROWS, COLS = 512, 90
"""Rows: a block of 128 for each of 4 ranks. Columns: odd numbers of every format's blocks, the last of them ragged."""
FORMATS = [
    "fp8", "fp8(dtype=e5m2, pow2=true)", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "fp8(scaling=block)",
    "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4", "nvfp4(block=16x16)", "identity",
    "identity(dtype=bfloat16)", "mxfp4",
]  # fmt: skip
"""Those of ``quantizers.QUANTIZERS`` whose column operand is not rotated, which a weight cannot be, and the example."""
DERIVED = [
    f"hybrid(row={a}, col={b}, col_source=row)"
    for a, b in zip(MIXED, MIXED[3:] + MIXED[:3], strict=True)
    if "delayed" not in b
]
KINDS = ["fp8", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "mxfp8", "nvfp4(block=16x16)", "mxfp4"]
PIECES = {1: [KINDS], 2: [FORMATS + DERIVED, FEW], 4: [KINDS]}
"""By the number of ranks, so many weights FSDP2 gathers together. Two ranks try every format and hybrids of them: what
they are does not depend on the number of ranks."""


def _sharded(quantizers: list[str], weights: str, seed: int, **options: Any) -> tuple[Side, list[Tensor]]:
    values = [value(ROWS, COLS, seed + i) for i in range(len(quantizers))]
    net = side(quantizers, values, weights)
    fully_shard(net, **options)
    return net, values


def _check(net: Side, quantizers: list[str], values: list[Tensor], states: list[Any], x: Tensor) -> None:
    """One forward and backward: all its bytes."""
    found = gathered(net, x)
    assert len(found) == 2 * len(quantizers)
    for i, (text, whole, state) in enumerate(zip(quantizers, values, states, strict=True)):
        for when, direction in (("forward", "row"), ("backward", "col")):
            assert equal_states(found[f"layers.{i}", when], expected(text, whole, direction, state)), (text, when)


def _states(net: Side) -> list[Any]:
    """Each layer's memory of its weight, before it moves."""
    states = [layer.weight_state() for layer in net.layers]
    return [{name: tensor.clone() for name, tensor in state.items()} if state else None for state in states]


def _high_precision(quantizers: list[str], seed: int, x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    """As initialised, and after an optimizer's step."""
    net, values = _sharded(quantizers, "high_precision", seed, **options)
    assert all(entry.note.startswith("gathered as ") for entry in lpq.report(net).weights)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    _check(net, quantizers, [v.to(dtype) for v in values], _states(net), x)
    optimizer.step()
    before, values = values, [layer.weight.full_tensor().detach().clone() for layer in net.layers]
    assert not any(torch.equal(a, b) for a, b in zip(before, values, strict=True))
    _check(net, quantizers, [v.to(dtype) for v in values], _states(net), x)


def _quantized(quantizers: list[str], seed: int, x: Tensor, **options: Any) -> None:
    """As converted, and after the sharded weights were written to."""
    net, values = _sharded(quantizers, "quantized", seed, **options)
    nothing = [None] * len(values)
    assert all(isinstance(layer.weight._local_tensor, QuantizedTensor) for layer in net.layers)
    _check(net, quantizers, values, nothing, x)
    written = [value(ROWS, COLS, 1000 + seed + i) for i in range(len(values))]
    with torch.no_grad():
        for layer, new in zip(net.layers, written, strict=True):
            mesh, placements = layer.weight.device_mesh, layer.weight.placements
            layer.weight.copy_(distribute_tensor(new, mesh, placements, src_data_rank=None))
    _check(net, quantizers, written, nothing, x)


def _every_one(rank: int, ranks: int) -> None:
    x = torch.randn(32, COLS, generator=torch.Generator().manual_seed(rank))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for number, quantizers in enumerate(PIECES[ranks]):
        seed = 100 * number
        _high_precision(quantizers, seed, x, torch.float32)
        if number == 0 and ranks == 2:
            _high_precision(quantizers, seed, x, torch.bfloat16, mp_policy=bf16, reshard_after_forward=False)
        _quantized(quantizers, seed, x, reshard_after_forward=number != 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes(mxfp4: None, ranks: int) -> None:
    spawn(_every_one, ranks, ranks)
