"""Weights that FSDP2 gathers encoded: a pass has nothing but their operands, so their shards are observed beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from lpq.distributed.shard import plain
from lpq.nn.weighted_layer import WeightedLayer
from lpq.operations.cut import Cut
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed, operands_of_part


def shards(layers: Iterable[Any]) -> Iterator[Observed]:
    """Yield this rank's shard of each weight in high precision that is gathered encoded. All ranks that share the
    weights call this. Left out are shards that are not equal, or that other ranks divide further."""
    for layer in layers:
        plan = layer.passes.plan
        if plan is None or not isinstance(layer, WeightedLayer) or layer.gather is None:
            continue
        weight: Any = layer.shared_weight()
        if not isinstance(weight, DTensor):
            continue
        local, dims = plain(weight.to_local().detach()), [i for i, p in enumerate(weight.placements) if p == Shard(0)]
        others = [p for p in weight.placements if p != Shard(0) and not isinstance(p, Replicate)]
        if isinstance(local, QuantizedTensor) or others or len(dims) != 1:
            continue
        mesh, (dim,) = weight.device_mesh, dims
        ranks, state = mesh.size(dim), layer.states().get("w")
        if local.dim() == 3:
            yield Observed(layer=layer, name="w", given=local, quantizer=plan.w, state=state)
        elif len(weight) % ranks == 0:
            cut = Cut(0, mesh.get_local_rank(dim), ranks, len(local))
            row, col = operands_of_part(cut, plan.w)
            yield Observed(
                layer=layer, name="w", given=local, quantizer=plan.w, state=state,
                row=row, col=col, cut=cut, among=mesh.get_group(dim).group_name,
            )  # fmt: skip
