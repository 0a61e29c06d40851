"""Buffers of several numbers for each block are sharded, gathered, cast and saved as any others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import value_formats
from ranks import spawn
from sharded import How, built, same, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq import checkpoint
from lpq.core import QuantizedTensor
from lpq.formats import Buffer

SIZES = {"width": 512, "inner": 512, "blocks": 1, "ranks": 2}


def _recipe(text: str) -> str:
    return f"x=mxfp8(), w={text if text.endswith(')') else text + '()'}, dy=mxfp8()"


def _buffers(tensor: Tensor) -> dict[str, Tensor]:
    assert isinstance(tensor, QuantizedTensor)
    return {f"{d}.{name}": buffer for d, operand in tensor.operands for name, buffer in operand.buffers().items()}


def _shards_are_those_of(net: nn.Module, unsharded: nn.Module, rank: int) -> None:
    """Buffer by buffer."""
    compared = 0
    for here, whole in zip(net.parameters(), unsharded.parameters(), strict=True):
        if not isinstance(whole.data, QuantizedTensor):
            continue
        local = here.to_local() if isinstance(here, DTensor) else here
        rows = local.shape[0]
        expected = _buffers(whole.data[rank * rows : (rank + 1) * rows])
        for name, buffer in _buffers(local).items():
            assert torch.equal(buffer, expected[name]), name
            compared += buffer.dim() != 2
    assert compared, "none has several numbers for each block"


def _training_is_as_unsharded(rank: int, folder: Path) -> None:
    ways = [*((text, "quantized") for text in value_formats.NAMES), (value_formats.NAMES[0], "high_precision")]
    for text, weights in ways:
        losses, net = train(How(_recipe(text), weights, **SIZES), 2)
        assert "in high precision" not in str(lpq.report(net)), text
        expected, unsharded = train(How(_recipe(text), weights, shard=False, **SIZES), 2)
        assert same(losses, expected), (text, weights)
        if weights == "quantized":
            _shards_are_those_of(net, unsharded, rank)


def _checkpoints_of_shards_load_whole(rank: int, folder: Path) -> None:
    for text in value_formats.NAMES:
        how = How(_recipe(text), "quantized", **SIZES)
        _, net = train(how, 1)
        path = checkpoint.save(net, folder / text)
        for loaded, shards in ((built(how), True), (built(How(how.recipe, "quantized", shard=False, **SIZES)), False)):
            checkpoint.load(loaded, path)
            if not shards:
                _shards_are_those_of(net, loaded, rank)
                continue
            for a, b in zip(net.parameters(), loaded.parameters(), strict=True):
                if isinstance(a.to_local(), QuantizedTensor):
                    found, expected = _buffers(b.to_local()), _buffers(a.to_local())
                    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _with_the_formats(rank: int, check: Callable[[int, Path], None], folder: Path) -> None:
    value_formats.register()
    check(rank, folder)


@pytest.mark.parametrize("check", [_training_is_as_unsharded, _checkpoints_of_shards_load_whole])
def test_two_ranks(check: Callable[[int, Path], None], tmp_path: Path) -> None:
    spawn(_with_the_formats, 2, check, tmp_path)


def test_what_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match="'data' has 3 values for each block: it cannot be column_major"):
        Buffer("data", torch.uint8, values=3, column_major=True)
    with pytest.raises(ValueError, match="'data' has values=0: say how many each block has, 1 or more"):
        Buffer("data", torch.uint8, values=0)
