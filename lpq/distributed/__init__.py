"""Sharded training: quantized weights gathered by FSDP2, and casting shards of master weights.

It is all measure → reduce → encode over the declared layout, so that every format and every mixture of formats is
sharded by the same lines. FSDP2's private state is touched in ``lpq.torch_private.fsdp`` alone.
"""

from lpq.distributed.masters import Piece, Pieces, cast_master_weights, finish_gather
from lpq.distributed.shard_groups import attach

__all__ = ["Piece", "Pieces", "attach", "cast_master_weights", "finish_gather"]
