"""The bytes of a gathered weight are those of quantizing the whole weight: every format, and hybrids of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import counted_format
import double_format
import odd_formats
import pytest
import residual_format
import torch
import torch.distributed as dist
import value_formats
import whole_formats
from hybrids import FEW, MIXED
from operands import Side, as_shard_of, check_gathered, expected, memories, side, value
from ranks import fully_shard, on_ranks
from support.comparing import copy_bytes, equal_states
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import lpq
from lpq import checkpoint
from lpq.core import QuantizedTensor

ROWS, COLS = 512, 90
"""Rows: a block of 128 for each of 4 ranks. Columns: odd numbers of every format's blocks, the last of them ragged."""
FORMATS = [
    "fp8", "fp8(dtype=e5m2, pow2=true)", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "fp8(scaling=block)",
    "fp8(scaling=block, block=128x128)", "mxfp8", "nvfp4", "nvfp4(block=16x16)", "identity",
    "identity(dtype=bfloat16)", "mxfp4",
]  # fmt: skip
"""Those of ``quantizers.QUANTIZERS`` whose column operand is not rotated, which a weight cannot be."""
DERIVED = [
    f"hybrid(row={a}, col={b}, col_source=row)"
    for a, b in zip(MIXED, MIXED[3:] + MIXED[:3], strict=True)
    if "delayed" not in b
]
KINDS = ["fp8", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "mxfp8", "nvfp4(block=16x16)", "mxfp4"]
COMPOSITE = [
    "residual(base=nvfp4, rest=mxfp8)",
    "residual(base=fp8, rest=fp8(scaling=block, block=1x128))",
    "residual(base=hybrid(row=mxfp8, col=nvfp4), rest=identity(dtype=bf16))",
]
OTHERS = [
    *COMPOSITE, *value_formats.NAMES, whole_formats.STRIDED, "double", "odd_own", "odd_zero", "odd_tall", "odd_levels",
]  # fmt: skip
"""Made of others; with several numbers for each block; with strides of their own; with two levels of scales; with codes
of several elements."""
PIECES = {1: [KINDS], 2: [FORMATS + DERIVED, FEW, OTHERS], 4: [KINDS]}
"""By the number of ranks, so many weights FSDP2 gathers together. Two ranks try every format and hybrids of them: what
they are does not depend on the number of ranks."""


def _register() -> None:
    for formats in (counted_format, double_format, odd_formats, residual_format, value_formats, whole_formats):
        formats.register()


def _sharded(quantizers: Sequence[str], weights: str, seed: int, **options: Any) -> tuple[Any, list[Tensor]]:
    values = [value(ROWS, COLS, seed + i) for i in range(len(quantizers))]
    net = fully_shard(side(quantizers, values, weights), **options)
    notes = [entry.note for entry in lpq.report(net).weights]
    assert all(note.startswith(("gathered as ", "stored and gathered as ")) for note in notes), notes
    return net, values


def _high_precision(quantizers: list[str], seed: int, x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    """As initialised, and after an optimizer's step."""
    net, values = _sharded(quantizers, "high_precision", seed, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    check_gathered(net, quantizers, [v.to(dtype) for v in values], memories(net), x)
    optimizer.step()
    before, values = values, [layer.weight.full_tensor().detach().clone() for layer in net.layers]
    assert not any(torch.equal(a, b) for a, b in zip(before, values, strict=True))
    check_gathered(net, quantizers, [v.to(dtype) for v in values], memories(net), x)


def _quantized(quantizers: list[str], seed: int, x: Tensor, **options: Any) -> tuple[Side, list[Tensor]]:
    """As converted, and after the sharded weights were written to."""
    net, values = _sharded(quantizers, "quantized", seed, **options)
    nothing = [None] * len(values)
    assert all(isinstance(layer.weight._local_tensor, QuantizedTensor) for layer in net.layers)
    check_gathered(net, quantizers, values, nothing, x)
    written = [value(ROWS, COLS, 1000 + seed + i) for i in range(len(values))]
    with torch.no_grad():
        for layer, new in zip(net.layers, written, strict=True):
            layer.weight.copy_(as_shard_of(layer.weight, new))
    check_gathered(net, quantizers, written, nothing, x)
    return net, written


@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_ranks()
def test_bytes(rank: int, ranks: int, tmp_path: Path) -> None:
    _register()
    x = torch.randn(32, COLS, generator=torch.Generator().manual_seed(rank))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for number, quantizers in enumerate(PIECES[ranks]):
        seed = 100 * number
        _high_precision(quantizers, seed, x, torch.float32)
        if number == 0 and ranks == 2:
            _high_precision(KINDS, seed, x, torch.bfloat16, mp_policy=bf16, reshard_after_forward=False)
        net, written = _quantized(quantizers, seed, x, reshard_after_forward=number != 1)
        if quantizers is OTHERS:  # a checkpoint has them, for shards and for one process
            checkpoint.save(net, tmp_path / "saved")
            other, values = _sharded(quantizers, "quantized", 77)
            checkpoint.load(other, tmp_path / "saved")
            check_gathered(other, quantizers, written, [None] * len(written), x)
            alone = side(quantizers, values, "quantized")
            checkpoint.load(alone, tmp_path / "saved")
            for text, layer, whole in zip(quantizers, alone.layers, written, strict=True):
                for direction, operand in layer.weight.operands:  # type: ignore[union-attr]
                    found = {name: copy_bytes(buffer) for name, buffer in operand.buffers().items()}  # type: ignore[union-attr]
                    assert equal_states(found, expected(text, whole, direction)), (text, direction)


@on_ranks(2)
def test_a_part_that_would_be_measured_later_keeps_a_weight_whole(rank: int) -> None:
    """The amax of what is left would take a second round: no shard has it."""
    _register()
    text = "residual(base=nvfp4, rest=fp8)"
    words = f"of an operand of {text} must not be cut"
    net = fully_shard(side([text], [value(256, 96)], "high_precision", ranks=2))
    assert [words in entry.note for entry in lpq.report(net).weights] == [True]
    x = value(128, 96)
    with pytest.raises(ValueError, match=re.escape(words)):
        lpq.quantizer(text).quantize(x, amax_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="shards of 80 rows cut the blocks of 32 of residual"):
        lpq.quantizer(COMPOSITE[0]).quantize(x[:80], amax_group=dist.group.WORLD)
