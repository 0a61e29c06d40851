"""Ranks that have other models, or give them other inputs, under tensor and expert parallelism, in both with FSDP2, and
in a DistributedDataParallel: all raise, and say what differs where. ``test_other_models`` has FSDP2 alone.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from ranks import agreed, fully_shard, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.distributed import alike, expert_rows, meeting, model_check
from lpq.distributed.alike import check_alike
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from lpq.nn import GroupedLinear
from lpq.nn.stages import Stages
from lpq.observe import Collective, collectives

COMPARED = Collective("all_reduce", 32)
"""By which ranks see that all have the same input, or are at the same step of a policy."""
E5M2 = "mxfp8(dtype=e5m2)"
STAGED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 2}, {"match": "*", "recipe": E5M2}]}
X = torch.ones(2, 32, 64)


def _net(recipe: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return lpq.convert(net, recipe)


def _parallel(recipe: Any, mesh: DeviceMesh | None = None) -> Any:
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) if recipe is None else _net(recipe)
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    return parallelize_module(net, mesh or init_device_mesh("cpu", (2,)), plan)


def _refused(work: Callable[[], Any], *words: str, begins: str = "the ranks do not have the same model: ") -> None:
    for said in agreed(work, RuntimeError):
        assert said.startswith(f"RuntimeError: {begins}rank "), said
        assert all(word in said for word in words), (words, said)
        assert said.endswith("alike on all ranks"), said


# ---------------------------------------------------------------------------------- tensor parallelism


@on_ranks(2)
def test_tensor_parallel(rank: int) -> None:
    for recipes in (
        ("mxfp8", E5M2),
        ("nvfp4()", "x=nvfp4(), w=nvfp4(block=16x16), dy=nvfp4()"),  # which differ in the weight alone
        ("mxfp8", "fp8-current"),  # and in how many bytes travel
        ("mxfp8", "bf16"),
        ("fp8-current", "fp8-delayed"),  # of which one has buffers, which torch sends
    ):
        words = [f"recipe {lpq.recipe(recipe).text}, input S(1), output S(-1)]" for recipe in recipes]
        _refused(lambda: _parallel(recipes[rank]), "[0: Linear with a weight [128, 64]", *words)  # noqa: B023
        net = _parallel("fp8-row")
        for layer in (net[0], net[2]):
            layer.recipe = recipes[rank]
        _refused(lambda: net(X), "[0: Linear with a weight [128, 64]", *words)  # noqa: B023
    _refused(
        lambda: _parallel("mxfp8" if rank else None), "recipe mxfp8(), input S(1)", "[Linear: Linear, not converted"
    )
    net = _parallel("mxfp8")
    net(X).sum().backward()
    net[2].recipe = "mxfp8" if rank == 0 else E5M2
    _refused(lambda: net(X), "rank 1 has [2: Linear", E5M2)


@on_ranks(2)
def test_step_on_one_rank(rank: int) -> None:
    """It is found in the next pass, though it changes no recipe yet."""
    net = _parallel(STAGED)
    for step in (0, 1):
        lpq.set_step(net, step)
        net(X)
    if rank == 1:
        lpq.set_step(net, 0)
    _refused(lambda: net(X), "at step 1 of (mxfp8 until step 2", "at step 0 of")
    lpq.set_step(net, 2)
    net(X)
    lpq.set_step(net, 2 + rank)  # no later step changes a recipe
    net(X)


@on_ranks(2)
def test_other_parts(rank: int) -> None:
    """Of a sequence, in a first pass and in a later one. All go on to work."""
    net = _parallel("mxfp8")
    begins = "the ranks do not call the same layer with equal parts of its input: "
    for _ in range(2):
        part = X if rank == 0 else X[:, :16]
        _refused(lambda: net(part), "[2, 32, 64]", "[2, 16, 64]", begins=begins)  # noqa: B023
        net(X).sum().backward()
    other = X.bfloat16() if rank else X
    _refused(lambda: net(other), "torch.float32, ", "torch.bfloat16, ", begins=begins)
    _refused(lambda: net(X.clone().requires_grad_(rank == 1)), "of its input and its weight", begins=begins)


@on_ranks(2)
def test_a_gpu_is_waited_for_where_something_is_new(rank: int) -> None:
    net = _parallel("mxfp8")

    def times(x: Tensor) -> tuple[int, int]:
        with collectives() as seen, mock.patch.object(meeting, "meet", wraps=meeting.meet) as met:
            net(x)
        return seen.count(COMPARED), met.call_count

    with mock.patch.object(model_check, "FREE", ()):
        assert [times(x) for x in (X, X, X[:, :16], X[:, :16], X)] == [(2, 2), (0, 0), (2, 0), (0, 0), (0, 0)]
        net[2].recipe = "fp8-current"
        assert [times(x) for x in (X, X)] == [(0, 1), (0, 0)]


@on_ranks(2)
def test_without_a_conversion(rank: int) -> None:
    """Layers that were made by hand, and copies."""
    mesh, style = init_device_mesh("cpu", (2,)), ColwiseParallel(input_layouts=Shard(1))
    for layer in (lpq.nn.Linear(64, 128, recipe="fp8-row"), copy.deepcopy(_net("fp8-row")[0])):
        layer = parallelize_module(layer, mesh, style)
        layer.recipe = ("mxfp8", E5M2)[rank]
        _refused(lambda: layer(X), "Linear with a weight [128, 64]", E5M2)  # noqa: B023


@on_ranks(2)
def test_before_a_step(rank: int) -> None:
    """Where no pass compares: a compiled one does not."""
    net = _parallel("fp8-row")
    net[0].recipe = ("mxfp8", "fprop=mxfp8, dgrad=bf16, wgrad=mxfp8")[rank]
    optimizer = torch.optim.SGD(net.parameters())
    _refused(optimizer.step, "fprop=mxfp8(), ")


# ---------------------------------------------------------------------------------- experts


class _Experts(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.up = GroupedLinear(4, 64, 32, bias=False, recipe=recipe)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.up(x, ends)  # type: ignore[no-any-return]


def _mx(text: str) -> str:
    both = f"hybrid(row={text}, col={text}, col_source=row)"
    return f"x={both}, w=mxfp8(), dy={both}"


ENDS = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
OTHER = "the ranks do not have the same experts: "


@on_ranks(2)
def test_experts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for recipes, dispatched in (
        ((_mx("mxfp8"), _mx(E5M2)), ("encoded", "encoded")),
        (("mxfp8", "fp8-current"), ("high_precision",) * 2),
        ((_mx("mxfp8"), _mx("mxfp8")), ("encoded", "high_precision")),
    ):
        style = ExpertParallel(dispatch=dispatched[rank])  # type: ignore[arg-type]
        made = "[_Experts.up: GroupedLinear with a weight [4, 32, 64]"
        _refused(lambda: parallelize_module(_Experts(recipes[rank]), mesh, style), made)  # noqa: B023
        if dispatched[0] == dispatched[1]:
            model = parallelize_module(_Experts(recipes[0]), mesh, style)
            model.up.recipe = recipes[rank]
            _refused(lambda: model(X[0], ENDS), made, begins=OTHER)  # noqa: B023
    model = parallelize_module(_Experts("mxfp8"), mesh, ExpertParallel())
    model(X[0], ENDS)
    other = X[0].bfloat16() if rank else X[0]
    _refused(lambda: model(other, ENDS), "[rows of [64] torch.bfloat16 without a gradient]", begins=OTHER)
    model.up.recipe = "mxfp8" if rank else "fp8-current"
    _refused(lambda: model(X[0], ENDS), "rank 1 has [_Experts.up", begins=OTHER)


@on_ranks(2)
def test_experts_are_described_where_something_changed(rank: int) -> None:
    model: Any = parallelize_module(_Experts("mxfp8"), init_device_mesh("cpu", (2,)), ExpertParallel())
    model.up.model.stages = Stages(model, 2)

    def times(x: Tensor) -> int:
        with mock.patch.object(alike, "description", wraps=alike.description) as described:
            model(x, ENDS)
        return described.call_count

    found = [times(X[0]), times(X[0]), times(X[0].bfloat16()), times(X[0])]
    assert found == [1, 0, 1, 0], found
    model.up.recipe = "fp8-current"
    assert [times(X[0]), times(X[0])] == [1, 0]
    model.up.model.stages.move(1)
    assert [times(X[0]), times(X[0])] == [1, 0]
    assert copy.deepcopy(model.expert_exchange)._described._layers[0] is not model.up, "a copy describes itself"


@on_ranks(2)
def test_rows_that_one_rank_cannot_encode(rank: int) -> None:
    model = parallelize_module(
        _Experts(_mx("mxfp8")), init_device_mesh("cpu", (2,)), ExpertParallel(dispatch="encoded")
    )
    model(X[0], ENDS)
    if rank == 1:
        model.up.recipe = "mxfp8"
    told = agreed(lambda: model(X[0], ENDS), ValueError)
    assert told[0].startswith("ValueError: _Experts: rank 1 could not send its rows: ValueError: _Experts: rows cannot")
    assert told[1].startswith("ValueError: _Experts: rows cannot be dispatched encoded as x=mxfp8: ")


@on_ranks(2)
def test_a_gradient_that_one_rank_cannot_encode(rank: int) -> None:
    """It is found in the middle of backward, in which no rank waits for that one; then all go on to work."""
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(_Experts(_mx("mxfp8")), mesh, ExpertParallel(dispatch="encoded"))
    x = X[0].clone().requires_grad_()
    y = model(x, ENDS)
    lines, broken = expert_rows._lines, OSError("this rank's disk is on fire")
    with mock.patch.object(expert_rows, "_lines", side_effect=broken if rank else lines):
        found = agreed(lambda: y.sum().backward(), (OSError, RuntimeError))
    assert found[1] == "OSError: this rank's disk is on fire"
    begins = "RuntimeError: rank 1 could not encode the gradients of the results of experts: OSError: this rank's"
    assert found[0].startswith(begins), found
    model(x, ENDS).sum().backward()


# ---------------------------------------------------------------------------------- DistributedDataParallel


def _stepped(net: nn.Module) -> None:
    net(X).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


@on_ranks(2)
def test_replicas(rank: int) -> None:
    net = DistributedDataParallel(_net(("mxfp8", "nvfp4")[rank]))
    _refused(lambda: net(X), "[0: Linear with a weight [128, 64] of torch.float32, recipe mxfp8()]", "nvfp4")
    net = DistributedDataParallel(_net(STAGED))
    for step in (0, 1):
        lpq.set_step(net, step)
        _stepped(net)
    if rank == 1:
        lpq.set_step(net, 0)
    _refused(lambda: _stepped(net), "at step 1 of", "at step 0 of")
    lpq.set_step(net, 2)
    for compares in (1, 0):  # the steps, for the last time
        with collectives() as seen:
            _stepped(net)
        assert seen.count(COMPARED) == compares


@on_ranks(2)
def test_models_that_no_conversion_left(rank: int) -> None:
    """Copies, layers that were made by hand, and models whose weights were prepared for FSDP2."""
    recipe = ("mxfp8", E5M2)[rank]
    by_hand = nn.Sequential(lpq.nn.Linear(64, 128, recipe=recipe))
    prepared = lpq.convert(nn.Sequential(nn.Linear(64, 128)), recipe, weights="high_precision", ranks=2)
    for net in (copy.deepcopy(_net(recipe)), by_hand, prepared):
        _refused(lambda: DistributedDataParallel(net)(X), "Linear with a weight [128, 64]", E5M2)  # noqa: B023
    for net in (copy.deepcopy(_net(recipe)), copy.deepcopy(by_hand)):
        _refused(lambda: fully_shard(net)(X), "Linear with a weight [128, 64]", E5M2)  # noqa: B023


@on_ranks(2)
def test_parts_of_a_model(rank: int) -> None:
    """Which were converted one by one. The heap is not searched for the wrapper."""
    net = DistributedDataParallel(nn.Sequential(_net("mxfp8"), _net("mxfp8"), _net("nvfp4()")))
    with mock.patch.object(gc, "get_objects") as sought:
        _stepped(net)
        _stepped(net)
    assert not sought.called
    net.module[2][0].recipe = ("mxfp8", "fp8-row")[rank]
    _refused(lambda: _stepped(net), "rank 1 has [0: Linear")


@on_ranks(2)
def test_models_of_their_own(rank: int) -> None:
    """Nothing is shared, though another model is: neither raises, and none waits."""
    shared = DistributedDataParallel(_net("mxfp8"))
    _stepped(_net(("mxfp8", "nvfp4")[rank]))
    if rank == 0:
        _stepped(_net(STAGED))
    mixed = nn.ModuleDict({"own": _net(("mxfp8", "nvfp4")[rank]), "shared": nn.Linear(64, 64)})
    mixed._ddp_params_and_buffers_to_ignore = [name for name, _ in mixed.named_parameters() if "own" in name]
    wrapped = DistributedDataParallel(mixed)
    torch.optim.SGD(wrapped.parameters()).step()
    _stepped(shared)


# ---------------------------------------------------------------------------------- several dimensions


def _two_dimensions(rank: int) -> None:
    """Recipes that differ along one of them alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for recipe, along_dp in (((E5M2, "mxfp8")[rank % 2], False), ((E5M2, "mxfp8")[rank // 2], True)):
        net = _parallel("fp8-row", mesh["tp"])
        fully_shard(net, mesh=mesh["dp"])
        net[0].recipe = recipe
        _refused(lambda: net(X), "[0: Linear with a weight [128, 64] of torch.float32, in high precision, ", E5M2)  # noqa: B023
        net = DistributedDataParallel(_net(recipe), device_mesh=mesh["dp"])
        if along_dp:
            _refused(lambda: _stepped(net), E5M2)  # noqa: B023
        else:
            _stepped(net)  # the other dimension has nothing to do with it


def _replicas_of_experts(rank: int) -> None:
    """They exchange no rows, and are compared before they are written to."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = parallelize_module(_Experts(("mxfp8", "fp8-current")[rank // 2]), mesh["ep"], ExpertParallel())
    fully_shard(model, mesh=mesh["dp"])
    _refused(torch.optim.SGD(model.parameters()).step, "[up: GroupedLinear", "fp8(dtype=e5m2)")


def _layers_over_different_ranks(rank: int) -> None:
    """Ranks that share no layer that differs hear of it from those that do, and none waits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(_net("fp8-current" if rank == 1 else "mxfp8"), _net("mxfp8"))
    for part, name in zip(net, ("tp", "dp"), strict=True):
        fully_shard(part, mesh=mesh[name])
    found = agreed(lambda: check_alike(net), RuntimeError)
    assert ["rank 1 has [0.0: " in said for said in found] == [True, True, False, False]
    assert all("say where they differ" in said for said in found[2:])


@on_ranks(4)
def test_four_ranks(rank: int) -> None:
    _two_dimensions(rank)
    _replicas_of_experts(rank)
    _layers_over_different_ranks(rank)
