"""Layout does not matter to experts in stacks: over 1, 2 and 4 ranks, beside tensor parallelism and FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import BATCHES, RECIPES, differs_on_some_rank, exported, laid_out, of_one, whole_statics
from models import Attention, data, statics
from ranks import on_one, on_ranks, spawn
from support.comparing import equal_states
from support.hugging_face import small
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.calibration import collecting, statistics
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from lpq.files.safetensors import Reader
from lpq.nn import GroupedLinear
from lpq.torch_private.tensors import local_part


class Routed(nn.Module):
    """Attention, experts in stacks to which a router sends tokens, and a layer that is given what they make."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.router = Attention(64), nn.Linear(64, 64), nn.Linear(64, 4, bias=False)
        self.experts = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        chosen = self.router(rows).argmax(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=4).cumsum(0, dtype=torch.int32)
        y = torch.zeros_like(rows).index_copy(0, order, self.experts(rows[order], ends))
        return self.last((rows + y).view(x.shape))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (lpq.nn.GroupedLinear(4, 64, 64, bias=False, recipe=None) for _ in range(3))
        with torch.no_grad():
            self.w3.weight[2, 5, 7] = 0.75

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.w2(self.w1(rows, ends).relu() + self.w3(rows, ends), ends)
        return y


EXPERTS = [(4, 1, False), (1, 1, True), (2, 1, True), (2, 2, False)]
"""Ranks that share out experts, ranks of tensor parallelism, and whether FSDP2 shards over the others."""


def routed(recipe: Any, ep: int, tp: int, fsdp: bool) -> Any:
    """A model with experts, laid out so over 4 ranks."""
    net: Any = lpq.convert(Routed(), recipe)
    mesh = init_device_mesh("cpu", (4 // (ep * tp), ep, tp), mesh_dim_names=("dp", "ep", "tp"))
    column = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    if tp > 1:
        parallelize_module(net.first, mesh["tp"], {**column, "o_proj": RowwiseParallel()})
    if ep > 1:
        parallelize_module(net.experts, mesh["ep"], ExpertParallel())
    if fsdp:
        fully_shard(net.experts, mesh=mesh["dp"])
        if ep == 1:
            fully_shard(net, mesh=mesh["dp"])
    return net


def _experts_alone(recipe: str, batches: list[Tensor], method: Any, samples: int) -> tuple[Any, Any]:
    """The same in one process, and the record of its calibration."""
    net = lpq.convert(Routed(), recipe)
    return net, lpq.calibrate(net, batches, method=method, samples=samples, process_group=of_one())


def _experts_over_two_and_shards_of_two(rank: int, recipe: str, folder: str) -> None:
    """EP=2 x FSDP=2, the rest sharded over all four: the files have the bytes of one process's, and those of a
    checkpoint. Controls: without the reduction scales are others; with experts in another order codes are."""
    of_one()
    expected, _ = on_one(_experts_alone, recipe, data(BATCHES, tokens=4), "max", 18)
    codes, mine = exported(expected, of_one()), data(BATCHES, tokens=4)[rank::4]

    def laid_out_so() -> Any:
        net: Any = lpq.convert(Routed(), recipe)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
        parallelize_module(net.experts, mesh["ep"], ExpertParallel())
        fully_shard(net.experts, mesh=mesh["dp"])
        return fully_shard(net, mesh=init_device_mesh("cpu", (4,)))

    net = laid_out_so()
    assert net.experts.w1.weight.to_local().shape == (1, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "reduce_max", lambda values, group: values)
        lpq.calibrate(net, mine, samples=18)
    assert differs_on_some_rank(net, statics(expected))
    torch.set_default_dtype(torch.bfloat16)  # statistics of experts on other ranks are fp32 all the same
    try:
        lpq.calibrate(net, mine, samples=18)
    finally:
        torch.set_default_dtype(torch.float32)
    lpq.export(net, Path(folder) / "x", layout="compressed-tensors")
    found = {name: value for file in Path(folder).glob("x/*.safetensors") for name, value in _bytes_of(file)}
    assert equal_states(found, codes)
    lpq.checkpoint.save(net, Path(folder) / "run")
    if rank == 0:
        lpq.export(Path(folder) / "run", Path(folder) / "y", layout="compressed-tensors", process_group=of_one())
        assert equal_states(dict(_bytes_of(Path(folder) / "y" / "model.safetensors")), codes)
    with torch.no_grad():
        local = net.experts.w1.weight.to_local()
        parts = [torch.empty_like(local) for _ in range(4)]
        dist.all_gather(parts, local.contiguous())
        local.copy_(parts[rank ^ 1])
    assert not equal_states(exported(net), codes)


def _bytes_of(file: Path) -> list[tuple[str, Tensor]]:
    reader = Reader(file)
    return [(n, v.view(torch.uint8) if v.itemsize == 1 else v) for n in reader.tensors for v in [reader.read(n)]]


def _fused_experts(rank: int) -> None:
    """Those of a Hugging Face model, which routes tokens itself."""
    batches = [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(BATCHES)]
    expected, net = (lpq.convert(small("Mixtral"), "fp8-current") for _ in range(2))
    lpq.calibrate(expected, batches, method="percentile", process_group=of_one())
    experts = net.get_submodule("model.layers.0.mlp.experts")
    parallelize_module(experts, init_device_mesh("cpu", (4,)), ExpertParallel())
    lpq.calibrate(net, batches[rank::4], method="percentile")
    found = {name: local_part(value) for name, value in experts.static_values().items()}
    assert equal_states(found, expected.get_submodule("model.layers.0.mlp.experts").static_values())
    assert equal_states(exported(net), exported(expected))
    with torch.no_grad():
        assert torch.equal(net(batches[0]).logits, expected(batches[0]).logits)


@pytest.mark.parametrize(("recipe", "method"), [*RECIPES.items()][::2], ids=["fp8", "searched"])
@on_ranks(4)
def test_experts_beside_tensor_parallelism_and_fsdp_over_4_ranks(rank: int, recipe: str, method: Any) -> None:
    """Experts over 1, 2 and 4 ranks, beside tensor parallelism and FSDP2; 5 batches, so that some ranks have fewer."""
    of_one()
    expected, made = on_one(_experts_alone, recipe, data(BATCHES, tokens=4), method, 18)
    static, codes = statics(expected), exported(expected)
    assert {"first", "experts", "last"} == {name.partition(".")[0] for name in static}
    x = data(1, tokens=4)[0]
    y = expected(x)
    for ep, tp, fsdp in laid_out(EXPERTS, method):
        net = routed(recipe, ep, tp, fsdp)
        again = lpq.calibrate(net, data(BATCHES, tokens=4)[rank // tp :: 4 // tp], method=method, samples=18)
        assert (again.samples, again.batches, again.layers) == (made.samples, made.batches, made.layers)
        assert equal_states(dict(again.values), dict(made.values)), (ep, tp, fsdp)
        assert equal_states(whole_statics(net), static), (ep, tp, fsdp)
        assert equal_states(exported(net), codes), (ep, tp, fsdp)
        computed = net(x)
        if tp == 1:  # else sums have another order
            assert torch.equal(computed, y), (ep, tp, fsdp)
        computed.square().sum().backward()


def test_experts_over_2_ranks_and_shards_over_2_are_exported_as_of_one(tmp_path: Path) -> None:
    spawn(_experts_over_two_and_shards_of_two, 4, "nvfp4", str(tmp_path))


def test_experts_of_hugging_face_models_over_4_ranks() -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    spawn(_fused_experts, 4)


@pytest.mark.filterwarnings("ignore:no token went through")
@on_ranks(4)
def test_experts_that_are_mixed_up_or_see_more_differ(rank: int) -> None:
    """Experts have numbers among all, see one batch at a time, and none that does not count: those behind the fifth."""
    batches = data(8, tokens=4)
    for batch in batches[5:]:
        batch *= 16
    of_one()
    expected, _ = on_one(_experts_alone, "fp8-current", batches, "max", 20)
    static = statics(expected)
    mixed_up = (GroupedLinear, "own_groups", lambda layer: slice(0, len(local_part(layer.weight))))
    at_once = (collecting, "_turns", lambda told, team: (0, 1))
    all_rows = (collecting, "sending", lambda model, rows: nullcontext())
    everywhere: list[Any] = [None] * 4
    for wrong in (None, mixed_up, at_once, all_rows):
        net = routed("fp8-current", 4, 1, False)
        with pytest.MonkeyPatch.context() as patch:
            if wrong is not None:
                patch.setattr(*wrong)
            lpq.calibrate(net, batches[rank::4], samples=20)
        dist.all_gather_object(everywhere, equal_states(whole_statics(net), static))
        assert everywhere == [wrong is None] * 4, wrong
