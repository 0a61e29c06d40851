"""Sharded training over NCCL: quantized gathers train as ordinary ones do, bit for bit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import spawn
from sharded import How, train, whole
from test_fsdp import RECIPES

import lpq.optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WAYS: list[dict[str, Any]] = [
    {},
    {"reshard": False, "mixed": True},
    {"mixed": True, "checkpoint": True},
    {"offload": True},
    {"accumulate": 2},
]


def _fused_masters(params: Any) -> torch.optim.Optimizer:
    return lpq.optim.MasterWeights(torch.optim.AdamW(params, lr=1e-2, fused=True))


def _same(a: How, b: How) -> None:
    ordinary, p = train(a)
    quantized, q = train(b)
    assert ordinary == quantized, b
    for (name, one), other in zip(p.named_parameters(), q.parameters(), strict=True):
        for x, y in zip(_parts(one), _parts(other), strict=True):
            assert torch.equal(x, y), (b, name)


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a parameter: of one that is stored quantized, those of this rank's buffers."""
    local = parameter.detach()._local_tensor  # type: ignore[attr-defined]
    if not isinstance(local, lpq.QuantizedTensor):
        return [whole(parameter.detach())]
    return [t.contiguous().view(-1).view(torch.uint8) for _, s in local.operands for t in s.tensors()]


def _trains_alike(rank: int) -> None:
    for recipe in RECIPES:
        for way in WAYS:
            how = How(recipe, device="cuda", **way)
            _same(replace(how, weights=None), how)


def _stored_weights_train_alike(rank: int) -> None:
    for recipe in RECIPES:
        how = How(recipe, weights="quantized", ranks=2, device="cuda", optimizer=_fused_masters)
        _same(how, replace(how, reshard=False))
        _same(how, replace(how, checkpoint=True))


def _compiled(rank: int) -> None:
    for way in ({"mixed": True}, {"checkpoint": True}):
        for recipe in ("fp8-current", "nvfp4"):
            how = How(recipe, compile=True, device="cuda", **way)
            _same(replace(how, weights=None), how)


@pytest.mark.parametrize("check", [_trains_alike, _stored_weights_train_alike, _compiled])
def test_two_gpus(check: Any) -> None:
    spawn(check, 2, backend="cpu:gloo,cuda:nccl")
