"""``lpq.restore`` refuses a model whose weights ranks share out, and changes nothing in it."""

from __future__ import annotations

import pytest
from ranks import mesh_of, on_ranks
from support.small_models import converted
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp


@on_ranks(2)
def test_what_is_sharded_is_refused(rank: int) -> None:
    for how in ("fsdp", "torch", "lpq"):
        model, mesh = converted("mxfp8", 64, 64), mesh_of()
        if how == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"0": (ColwiseParallel if how == "torch" else tp.ColwiseParallel)()})
        with pytest.raises(ValueError, match="it is sharded: restore the model before fully_shard and parallelize"):
            lpq.restore(model)
        assert isinstance(model[0], lpq.nn.Linear)
        assert model[0].recipe == lpq.recipe("mxfp8")
