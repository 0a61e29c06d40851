"""Starting quantized weights from high-precision values: a checkpoint of an ordinary model, or an initialisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lpq.distributed.ranks import raise_on_all, sharing
from lpq.distributed.shard_groups import attach
from lpq.nn.first_argument import check_model
from lpq.optim.masters import MasterWeights
from lpq.optim.unwrap import unwrapped
from lpq.tensor import QuantizedTensor
from lpq.tensor.encode_writes import write
from lpq.torch_private.tensors import local_part


@torch.no_grad()
def load_high_precision(model: nn.Module, state_dict: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> None:
    """Load ordinary weights into a model whose weights are sharded, stored quantized, or both.

    Masters get the values themselves; weights are encoded from them, with one reduction for all. Parameters and buffers
    must all be there, and nothing else. If they are not on one rank, all raise, and the weights that are stored
    quantized are as they were.

    Args:
        model: The model to load into.
        state_dict: The whole tensors by name, the same on every rank.
        optimizer: The ``MasterWeights`` whose masters get the values; None: there is none.
    """
    check_model(model)
    masters = unwrapped(optimizer) if optimizer is not None else None
    if masters is not None and not isinstance(masters, MasterWeights):
        raise TypeError(
            f"load_high_precision fills the masters of a MasterWeights, and got a {type(masters).__name__}: pass "
            "MasterWeights(optimizer), or no optimizer"
        )
    targets = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    stored: list[tuple[Tensor, Tensor]] = []
    error: Exception | None = None
    try:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_high_precision got a {type(state_dict).__name__}: pass whole tensors by name")
        others: dict[str, Any] = dict(state_dict)
        for name, target in targets.items():
            value = others.get(name)
            if not isinstance(value, Tensor) or value.shape != target.shape:
                continue  # load_state_dict reports it, unless it may be absent
            others[name] = shared_out(value, target)
            if isinstance(local_part(target), QuantizedTensor):
                attach(target)
                stored.append((target, local_part(others[name]).float()))
                others[name] = target.detach()
        model.load_state_dict(others)
    except Exception as raised:
        error = raised
    failed = "weights in high precision could not be loaded on all ranks, because "
    raise_on_all(error, sharing(targets.values()), failed, "")
    write([cast("QuantizedTensor", local_part(target)) for target, _ in stored], [value for _, value in stored])
    for target, value in stored:
        if masters is not None and target in masters.masters:
            local_part(masters.masters[target]).copy_(value)
            masters.seen(target)


def shared_out(value: Tensor, target: Tensor) -> Tensor:
    """The tensor cut as ``target`` is; every rank has the whole, so nothing is sent."""
    if not isinstance(target, DTensor) or isinstance(value, DTensor):
        return value
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
