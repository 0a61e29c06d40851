"""Models that FSDP2 shards are exported as they are unsharded; and what streaming one holds in memory."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import fully_shard, spawn
from support.comparing import equal_states
from tiny import Net, layers, tensors
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lpq
from lpq.checkpoint import CheckpointError
from lpq.core import QuantizedTensor
from lpq.distributed import tensor_parallel as tp
from lpq.engines import plan

LAYOUT = "compressed-tensors"


def sharded(recipe: Any, weights: Any, **options: Any) -> Any:
    model: Any = lpq.convert(Net(width=256), recipe, weights=weights)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _exports(rank: int, folder: str) -> None:
    for recipe in ("fp8-block", "nvfp4", tiny.MIXTURE):
        for weights in (None, "high_precision", "quantized"):
            where = Path(folder) / f"{recipe if isinstance(recipe, str) else 'mixture'}-{weights}"
            model = sharded(recipe, weights)
            lpq.export(model, where / "sharded", layout=LAYOUT)
            streamed = dict(lpq.export.stream(model, LAYOUT))
            whole = lpq.convert(Net(width=256), recipe)
            expected = dict(lpq.export.stream(whole, LAYOUT))
            assert equal_states(tensors(where / "sharded"), expected), where
            assert equal_states(streamed, expected), where
    _one_fails(rank, Path(folder), model)
    # As FSDP2 gathers it for training.
    model = sharded("mxfp8", "high_precision", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    lpq.export(model, Path(folder) / "half", layout="modelopt")
    rounded = lpq.convert(Net(width=256), "mxfp8")
    expected = dict(lpq.export.stream(rounded, "modelopt", dtype=torch.bfloat16))
    found = tensors(Path(folder) / "half")
    quantized = [n for n in found if n.rpartition(".")[0] in layers(rounded) and "weight" in n]
    assert len(quantized) == 8
    assert equal_states({n: found[n] for n in quantized}, {n: expected[n] for n in quantized})


def _exports_in_parallel(rank: int, folder: Path) -> None:
    columns, rows = tp.ColwiseParallel(), tp.RowwiseParallel()
    styles = {
        f"blocks.*.{name}": columns if name.endswith(("q_proj", "up_proj")) else rows
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    }
    for recipe in ("fp8-current", "fp8-block", "nvfp4"):
        model: Any = lpq.convert(Net(width=256), recipe)
        expected = dict(lpq.export.stream(model, LAYOUT))
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
        parts = [layer for layer in layers(model).values() if isinstance(layer.weight, DTensor)]
        assert len(parts) == 4
        lpq.export(model, folder / recipe, layout=LAYOUT)
        assert equal_states(dict(lpq.export.stream(model, LAYOUT)), expected)
        assert equal_states(tensors(folder / recipe), expected)


def test_layers_that_ranks_share_out_are_exported_as_of_one(tmp_path: Path) -> None:
    spawn(_exports_in_parallel, 2, tmp_path)


def _one_fails(rank: int, folder: Path, model: Any) -> None:
    """One rank's error is an error on all, none waits, and nothing gets the name."""
    made = plan.Assigned.tensors

    def failing(self: Any, pieces: Any) -> Any:
        if rank == 0 and "down_proj" in self.entry.name:
            raise CheckpointError("no place for this")
        return made(self, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.Assigned, "tensors", failing)
        with pytest.raises(CheckpointError, match=r"rank 0: .*no place for this"):
            lpq.export(model, folder / "failed", layout=LAYOUT)
    dist.barrier()
    assert not [*folder.glob("failed*")]


def test_a_sharded_model_is_exported_as_it_is_unsharded(tmp_path: Path) -> None:
    spawn(_exports, 2, str(tmp_path))


class Alive(TorchDispatchMode):
    """Counts the bytes of the memory that operators allocate while it lives, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest_float = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is not Tensor or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in known or storage._cdata in self._seen:
                continue
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            if tensor.dtype in (torch.float32, torch.bfloat16):
                self.largest_float = max(self.largest_float, tensor.numel())
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, count: int) -> None:
        self._seen.discard(key)
        self.now -= count


@pytest.mark.parametrize(("recipe", "layout"), [("mxfp8", LAYOUT), ("nvfp4", LAYOUT), ("fp8-block", "fp8-block")])
def test_streaming_stored_weights_makes_no_copy_in_high_precision(recipe: str, layout: str) -> None:
    """At no time is there as much as one weight in bf16 beside the model, and nothing large is a float.

    Control: weights in
    high precision."""
    model: Any = lpq.convert(Net(width=512, blocks=2, dtype=torch.bfloat16), recipe, weights="quantized")
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in layers(model).values())
    largest = 512 * 1024
    held = Alive()
    with held:
        for _name, tensor in lpq.export.stream(model, layout):
            del tensor
    assert held.most < 2 * largest
    assert held.largest_float < largest // 8
    ordinary: Any = lpq.convert(Net(width=512, blocks=2, dtype=torch.bfloat16), recipe)
    control = Alive()
    with control:
        for _name, tensor in lpq.export.stream(ordinary, layout):
            del tensor
    gc.collect()
    assert control.most > 2 * largest
    assert control.largest_float >= largest


def _holds_a_shard_and_a_layer(rank: int, folder: str) -> None:
    """Beside its shards: the largest weight, gathered, and what is made of it. Control: all, gathered at once."""
    for weights in (None, "quantized"):
        model: Any = lpq.convert(Net(width=256, blocks=6), "mxfp8", weights=weights)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        whole = sum(math.prod(p.shape) for p in model.parameters()) * 4
        largest = 512 * 256 * (4 if weights is None else 1)
        held = Alive()
        with held:
            lpq.export(model, Path(folder) / str(weights), layout=LAYOUT)
        assert held.most <= 4 * largest, (held.most, largest)
        assert 4 * largest < whole / 3
        streamed = Alive()
        with streamed:
            for _name, tensor in lpq.export.stream(model, LAYOUT):
                del tensor
        assert streamed.most <= 4 * largest
    model = sharded("mxfp8", None)
    control = Alive()
    with control:
        kept = [p.detach().full_tensor() for p in model.parameters()]
    assert control.most > sum(t.nbytes for t in kept) / 2


def test_no_rank_holds_more_than_a_shard_and_a_layer(tmp_path: Path) -> None:
    spawn(_holds_a_shard_and_a_layer, 2, str(tmp_path))
