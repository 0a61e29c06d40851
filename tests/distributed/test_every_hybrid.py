"""Hybrids of all formats train sharded, bit for bit, with several of FSDP2's options at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hybrids import FEW, MIXED
from ranks import spawn
from sharded import How, train
from stored import local, parts
from torch.distributed.device_mesh import init_device_mesh

from lpq.core import QuantizedTensor

EVERY = [text if text.endswith(")") else f"{text}()" for text in FEW + MIXED]
RULES: list[dict[str, Any]] = [
    {"match": f"{i // 2}.{('up', 'down')[i % 2]}", "recipe": f"x=mxfp8(), w={text}, dy=mxfp8()"}
    for i, text in enumerate(EVERY)
]
HOW = How(
    {"rules": RULES},
    width=256,
    inner=256,
    blocks=len(EVERY) // 2,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
)
"""A layer for each, wide enough for the largest blocks on each of two ranks. Parameters are stepped one by one: for a
list of a hundred sharded tensors torch takes seconds to find out how its results are sharded."""
STEPS = 2


def _stored(rank: int) -> None:
    """As unsharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    how = replace(HOW, weights="quantized", ranks=2, mesh=mesh, offload=True, reshard=False)
    losses, net = train(how, STEPS)
    stored = [p for p in net.parameters() if isinstance(local(p), QuantizedTensor)]
    assert len(stored) == len(EVERY)
    if rank in (1, 2):
        return  # a rank of each replica, and each half of the rows, are seen by the others
    alone, twin = train(replace(how, shard=False), STEPS)
    assert losses == alone
    assert len(set(losses)) == STEPS
    place = mesh.get_local_rank("shard")
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        rows = q.shape[0] // 2
        here, wanted = parts(local(p.detach())), parts(q.detach()[place * rows : (place + 1) * rows])
        assert here.keys() == wanted.keys(), name
        assert all(torch.equal(here[key], wanted[key]) for key in here), name


def test_stored_under_hsdp(mxfp4: None) -> None:
    spawn(_stored, 4)
