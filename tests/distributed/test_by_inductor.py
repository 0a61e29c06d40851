"""A block that Inductor compiled, sharded by FSDP2, trains as one that is neither, bit for bit.

The steps before Inductor are tried in more ways in ``test_fsdp``, beside blocks that are not compiled.
"""

from __future__ import annotations

import torch
from ranks import fully_shard, on_ranks
from sharded import backward, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW

import lpq
from lpq.optim import MasterWeights


def _trained(rank: int | None) -> tuple[list[float], list[Tensor]]:
    """One weight of the block is stored quantized, with masters, and the other one is gathered quantized. There is no
    more beside them than they share: Inductor makes kernels of it, which take seconds to compile."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    lpq.convert(block[0], "nvfp4", weights="quantized", ranks=2)
    lpq.convert(block[2], "mxfp8", weights="high_precision")
    net = nn.Sequential(block if rank is None else checkpoint_wrapper(block))
    if rank == 0:  # the other rank does the same collectives
        net[0].compile(fullgraph=True, backend="inductor")
    for module in () if rank is None else (net[0], net):
        fully_shard(module, reshard_after_forward=False)
    optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2))
    losses = []
    for number in range(2):
        losses.append(backward(net, torch.randn(32, 64, generator=torch.Generator().manual_seed(number))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [whole(p.detach()) for p in net.parameters()]


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    losses, values = _trained(rank)
    alone, expected = _trained(None)
    assert losses == alone
    assert losses[0] != losses[1]
    for a, b in zip(values, expected, strict=True):
        assert torch.equal(*(t.dequantize() if isinstance(t, lpq.QuantizedTensor) else t for t in (a, b)))
