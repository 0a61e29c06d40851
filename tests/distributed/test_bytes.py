"""What travels: forward gathers row operands, backward column operands, and a step reduces statistics once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from sharded import How, batch, built
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives, gathered_bytes

W8 = "x=mxfp8(), w={}, dy=mxfp8()"
SHARES = {
    "fp8-current": (0.52, 0.52),
    "fp8-delayed": (0.52, 0.52),
    "fp8-row": (0.52, 0.52),
    "fp8-block": (0.52, 0.52),
    "mxfp8": (0.52, 0.52),
    "nvfp4": (0.29, 0.29),  # 16x16: either operand is derived from what travels
    W8.format("nvfp4()"): (0.29, 0.29),
    W8.format("identity(dtype=bf16)"): (1.0, 1.0),
    W8.format("hybrid(row=mxfp8, col=nvfp4)"): (0.52, 0.29),
    W8.format("hybrid(row=nvfp4, col=mxfp8)"): (0.29, 0.52),
    W8.format("hybrid(row=nvfp4, col=mxfp8, col_source=row)"): (0.29, 0.29),
}


class _Linears(nn.Sequential):
    """A model of nothing but converted weights."""


def _sharded(recipe: str, reshard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    torch.manual_seed(0)
    net = _Linears(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    lpq.convert(net, recipe, weights="high_precision")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*net, net):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # several meshes of the same ranks are no difference
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3), 3 * 512 * 512


def _counted(rank: int) -> None:
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    for recipe, (forward_share, backward_share) in SHARES.items():
        net, optimizer, elements = _sharded(recipe)
        for step in range(2):
            with collectives() as forward:
                loss = net(x).float().square().mean()
            with collectives() as backward:
                loss.backward()
            with collectives() as update:
                optimizer.step()
                optimizer.zero_grad()
            bf16 = 2 * elements
            assert 0 < gathered_bytes(forward) <= forward_share * bf16, (recipe, gathered_bytes(forward) / bf16)
            assert 0 < gathered_bytes(backward) <= backward_share * bf16, (recipe, gathered_bytes(backward) / bf16)
            assert sum(c.kind == "all_gather" for c in forward) == 3
            assert not [c for c in backward if c.kind == "all_reduce"]
            if step:  # the first forward measures what was loaded, or initialised
                assert not [c for c in forward if c.kind == "all_reduce"], recipe
            reduced = recipe.startswith(("fp8-current", "fp8-delayed", "fp8-row")) or "nvfp4" in recipe
            assert [c.kind for c in update] == ["all_reduce"] * reduced, (recipe, update)


def _kept_weights_are_gathered_once(rank: int) -> None:
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    for recipe, share in (("nvfp4", 0.29), ("fp8-current", 0.52), ("mxfp8", 1.04)):
        net, _, elements = _sharded(recipe, reshard=False)
        with collectives() as seen:
            net(x).float().square().mean().backward()
        assert 0 < gathered_bytes(seen) <= share * 2 * elements, recipe
        assert sum(c.kind == "all_gather" for c in seen) == 3


def _a_checkpointed_block_gathers_both_in_backward(rank: int) -> None:
    how = How("mxfp8", checkpoint=True)
    bare = How("mxfp8")
    sizes = []
    for h in (bare, how):
        net = built(h)
        with collectives() as forward:
            loss = net(batch(0, h)).square().mean()
        with collectives() as backward:
            loss.backward()
        sizes.append((gathered_bytes(forward), gathered_bytes(backward)))
    assert sizes[0][0] == sizes[1][0]
    quantized = 2 * (512 * 256) * 2 * (1 + 1 / 32)
    assert sizes[1][1] - sizes[0][1] == quantized, sizes


def _freed(rank: int) -> None:
    """What was gathered is given back, and an operand that is not there is not read."""
    net = built(How("mxfp8"))
    seen: dict[str, tuple[int, int]] = {}

    def look(layer: Any, when: str) -> None:
        weight = layer.weight
        assert isinstance(weight, QuantizedTensor)
        seen[when] = tuple(s.tensors()[0].untyped_storage().size() for s in (weight.row, weight.col))
        kept.append(weight)

    kept: list[QuantizedTensor] = []
    layer = net[0].up
    layer.register_forward_hook(lambda m, a, o: look(m, "forward"))
    layer.register_full_backward_hook(lambda m, a, o: look(m, "backward"))
    x = batch(0, How("mxfp8")).requires_grad_()
    net(x).square().mean().backward()
    data = 512 * 256
    assert seen == {"forward": (data, 0), "backward": (0, data)}
    assert all(t.untyped_storage().size() == 0 for w in kept for _, s in w.operands for t in s.tensors())
    with pytest.raises(RuntimeError, match="is not there"):
        kept[0].dequantize()


def test_two_ranks() -> None:
    spawn(_two_ranks, 2)


def _two_ranks(rank: int) -> None:
    _counted(rank)
    _kept_weights_are_gathered_once(rank)
    _a_checkpointed_block_gathers_both_in_backward(rank)
    _freed(rank)
