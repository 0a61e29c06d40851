"""Ranks that have other models, or give them other inputs, under tensor and expert parallelism, in both with FSDP2, and
in a DistributedDataParallel: all raise, and say what differs where. ``test_other_models`` has FSDP2 alone.
"""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from differing import E5M2, SAID, STAGED, X, compares, net, parallel, refused, training
from ranks import agreed, fully_shard, mesh_of, of_all, on_ranks
from support.small_models import shared_out
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.distributed import alike, expert_rows, meeting
from lpq.distributed.alike import check_alike
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.tensor_parallel import ColwiseParallel, SequenceParallel
from lpq.nn import GroupedLinear
from lpq.nn.stages import Stages

FIRST = "[0: Linear with a weight [128, 64]"

# ---------------------------------------------------------------------------------- tensor parallelism


@on_ranks(2)
def test_tensor_parallel(rank: int) -> None:
    """As they are made, and where recipes change."""
    for recipes in (
        ("mxfp8", E5M2),
        ("nvfp4()", "x=nvfp4(), w=nvfp4(block=16x16), dy=nvfp4()"),  # which differ in the weight alone
        ("mxfp8", "fp8-current"),  # and in how many bytes travel
        ("mxfp8", "bf16"),
        ("fp8-current", "fp8-delayed"),  # of which one has buffers, which torch sends
    ):
        words = [FIRST, *(f"recipe {lpq.recipe(recipe).text}, input S(1), output S(-1)]" for recipe in recipes)]
        refused(lambda: parallel(recipes[rank]), *words)  # noqa: B023
        model = parallel("fp8-row")
        for layer in (model[0], model[2]):
            layer.recipe = recipes[rank]
        refused(lambda: model(X), *words)  # noqa: B023
    refused(lambda: parallel("mxfp8" if rank else None), "mxfp8(), input S(1)", "[Linear: Linear, not converted")
    model = parallel()
    model(X).sum().backward()
    model[2].recipe = "mxfp8" if rank == 0 else E5M2
    refused(lambda: model(X), "rank 1 has [2: Linear", E5M2)


@on_ranks(2)
def test_step_on_one_rank(rank: int) -> None:
    """It is found in the next pass, though it changes no recipe yet."""
    model = parallel(STAGED)
    for step in (0, 1):
        lpq.set_step(model, step)
        model(X)
    if rank == 1:
        lpq.set_step(model, 0)
    refused(lambda: model(X), "at step 1 of (mxfp8 until step 2", "at step 0 of")
    for step in (2, 2 + rank):  # no later step changes a recipe
        lpq.set_step(model, step)
        model(X)


@on_ranks(2)
def test_other_parts(rank: int) -> None:
    """Of a sequence, in a first pass and in a later one. All go on to work."""
    model = parallel()
    begins = "the ranks do not call the same layer with equal parts of its input: "
    for _ in range(2):
        part = X if rank == 0 else X[:, :16]
        refused(lambda: model(part), "[2, 32, 64]", "[2, 16, 64]", begins=begins)  # noqa: B023
        model(X).sum().backward()
    other = X.bfloat16() if rank else X
    refused(lambda: model(other), "torch.float32, ", "torch.bfloat16, ", begins=begins)
    refused(lambda: model(X.clone().requires_grad_(rank == 1)), "of its input and its weight", begins=begins)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):  # the sums of a first row-wise layer would not fit
        refused(lambda: model(X), "its weight and its bias, an output of torch.bfloat16]", begins=begins)
    model[2].bias.requires_grad_(rank == 1)  # whose gradient the ranks would sum
    refused(lambda: model(X), "its weight]", "its weight and its bias]", begins=begins)


@on_ranks(2)
def test_an_input_that_one_rank_cannot_take(rank: int) -> None:
    """The rank refuses it before it sends anything, and the other one would wait. All go on to work."""
    model = parallel()
    begins = "the ranks do not call the same layer with equal parts of its input: "
    bad: tuple[tuple[Any, str], ...] = (
        (X.to_sparse(), "the input is torch.sparse_coo: pass x.to_dense()"),
        (X.to("meta"), "the input is on meta and the weight on cpu"),
        (X.long(), "the input is torch.int64; float32"),
        (torch.tensor(1.0), "the input is [], its last dimension"),
        (torch.nested.nested_tensor([*X]), "the input is nested"),
        (torch.nested.nested_tensor([*X], layout=torch.jagged), "the input is nested"),
    )
    for one, words in bad:
        refused(lambda: model(one if rank else X), words, "[2, 32, 64]", begins=begins)  # noqa: B023
        model(X).sum().backward()


@on_ranks(2)
def test_a_gpu_is_waited_for_where_something_is_new(rank: int) -> None:
    model = parallel()

    def times(x: Tensor) -> tuple[int, int]:
        with mock.patch.object(meeting, "meet", wraps=meeting.meet) as met:
            return compares(lambda: model(x)), met.call_count

    with mock.patch.object(meeting, "FREE", ()):
        assert [times(x) for x in (X, X, X[:, :16], X[:, :16], X)] == [(0, 4), (0, 0), (0, 2), (0, 0), (0, 0)]
        model[2].recipe = "fp8-current"
        assert [times(x) for x in (X, X)] == [(0, 1), (0, 0)]


@on_ranks(2)
def test_on_gpus_a_rank_does_not_wait_for_others_that_know_their_input(rank: int) -> None:
    """It refuses its own, or says that it is new; here the other one does nothing meanwhile. All go on to work, and
    where all have new inputs, all raise."""
    model, soon = parallel(), mock.patch.object(meeting, "SOON", 0.2)
    with mock.patch.object(meeting, "FREE", ()), soon:
        expected = model(X)
        if rank == 1:
            with pytest.raises(TypeError, match=r"the input is torch\.int64; float32") as error:
                model(X.long())
            assert error.value.__notes__ == [mock.ANY]
            alone = pytest.raises(RuntimeError, match=r"input that is new .* for 0 s: .*\[2, 16, 64\].* the same size")
            with mock.patch.object(meeting, "limit", return_value=0.2), alone:
                model(X[:, :16])
        dist.barrier()
        assert torch.equal(model(X), expected)
    with mock.patch.object(meeting, "FREE", ()):
        begins = "the ranks do not call the same layer with equal parts of its input: "
        refused(lambda: model(X.long() if rank else X[:, :8]), "torch.int64; float32", "[2, 8, 64]", begins=begins)
        assert torch.equal(model(X), expected)


@on_ranks(2)
def test_without_a_conversion(rank: int) -> None:
    """Layers that were made by hand, and copies; and before a step where no pass compares, as a compiled one."""
    style = ColwiseParallel(input_layouts=Shard(1))
    for layer in (lpq.nn.Linear(64, 128, recipe="fp8-row"), copy.deepcopy(net("fp8-row")[0])):
        layer = parallelize_module(layer, mesh_of(), style)
        layer.recipe = ("mxfp8", E5M2)[rank]
        refused(lambda: layer(X), "Linear with a weight [128, 64]", E5M2)  # noqa: B023
    model = parallel("fp8-row")
    model[0].recipe = ("mxfp8", "fprop=mxfp8, dgrad=bf16, wgrad=mxfp8")[rank]
    refused(torch.optim.SGD(model.parameters()).step, "fprop=mxfp8(), ")


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("left_out", ["0", "2"])
@on_ranks(2)
def test_a_layer_that_one_rank_does_not_share_out(rank: int, left_out: str, gpus: bool) -> None:
    """That rank is at the next layer, or at its first pass, where ranks compare as well; on GPUs in the store."""
    plan = shared_out("0", "2", 1)
    if rank == 1:
        del plan[left_out]
    with mock.patch.object(meeting, "FREE", () if gpus else ("cpu",)):
        found = agreed(lambda: parallelize_module(net(), mesh_of(), plan)(X), RuntimeError)
    assert all(f": rank 0 has [{left_out}: Linear with a weight" in said for said in found), found


def _other_part(case: str, rank: int) -> nn.Module:
    """Share out a module that differs on rank 1 in something other than its recipe."""
    torch.manual_seed(0)
    other = rank == 1
    layer, norm, experts = nn.Linear(64, 128, bias=not other), nn.LayerNorm(64, bias=not other), nn.Module()
    if case == "a bias":
        return parallelize_module(lpq.convert(nn.Sequential(layer), "mxfp8"), mesh_of(), {"0": ColwiseParallel()})
    if case == "another size":
        return parallelize_module(nn.Linear(64, 128 << rank), mesh_of(), ColwiseParallel())
    if case == "a norm":
        return parallelize_module(norm, mesh_of(), SequenceParallel())
    experts.up = nn.Parameter(torch.ones(4, 32 << (case == "wider experts" and other), 64))
    if case == "a parameter of experts" and other:
        experts.bias = nn.Parameter(torch.ones(4, 32))
    return parallelize_module(experts, mesh_of(), ExpertParallel())


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [("a bias", "0.bias: [128]", "none"), ("a norm", "LayerNorm.bias: [64]", "none"),
     ("another size", "Linear.weight: [128, 64]", "Linear.weight: [256, 64]"),
     ("wider experts", "Module.up: [4, 32, 64]", "Module.up: [4, 64, 64]"),
     ("a parameter of experts", "none", "Module.bias: [4, 32]")],
)  # fmt: skip
@on_ranks(2)
def test_parts_that_differ_in_what_is_not_converted(rank: int, case: str, first: str, second: str) -> None:
    """torch would wait for a tensor that the other rank lacks, or take a part of another size for its own."""
    refused(lambda: _other_part(case, rank), f"rank 0 has [{first}", f"rank 1 has [{second}")


def _block() -> nn.Sequential:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.RMSNorm(64), lpq.nn.SwiGLU(64, 256)), "fp8-delayed")


@on_ranks(2)
def test_a_block_that_one_rank_fuses(rank: int) -> None:
    """Under tensor parallelism other operands travel, and all raise. Under FSDP2 the same travels, and
    the states, which ranks combine, are equal."""
    block, styles = _block(), shared_out(["1.gate_proj", "1.up_proj"], "1.down_proj", None)
    model = parallelize_module(lpq.fuse(block) if rank == 0 else block, mesh_of(), styles)
    found = agreed(lambda: model(X).sum().backward(), RuntimeError)
    assert all("in a fused block], and rank 1 has [layer 1.gate_proj" in said for said in found), found
    sharded = _block()
    step = training(fully_shard(lpq.fuse(sharded) if rank == 0 else sharded))
    step()
    step()
    states = {name: value.tolist() for name, value in sharded.state_dict().items() if not isinstance(value, DTensor)}
    first, second = of_all(states)
    assert first == second
    assert sum(name.endswith("_amax") for name in states) == 9, states


# ---------------------------------------------------------------------------------- experts


class _Experts(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.up = GroupedLinear(4, 64, 32, bias=False, recipe=recipe)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.up(x, ends)  # type: ignore[no-any-return]


def _shared(recipe: str, dispatch: Any = "high_precision") -> Any:
    return parallelize_module(_Experts(recipe), mesh_of(), ExpertParallel(dispatch=dispatch))


def _mx(text: str) -> str:
    both = f"hybrid(row={text}, col={text}, col_source=row)"
    return f"x={both}, w=mxfp8(), dy={both}"


ENDS = torch.tensor([8, 16, 24, 32], dtype=torch.int32)


@on_ranks(2)
def test_experts(rank: int) -> None:
    for recipes, dispatched in (
        ((_mx("mxfp8"), _mx(E5M2)), ("encoded", "encoded")),
        (("mxfp8", "fp8-current"), ("high_precision",) * 2),
        ((_mx("mxfp8"), _mx("mxfp8")), ("encoded", "high_precision")),
    ):
        made = "[_Experts.up: GroupedLinear with a weight [4, 32, 64]"
        refused(lambda: _shared(recipes[rank], dispatched[rank]), made)  # noqa: B023
        if dispatched[0] == dispatched[1]:
            model = _shared(recipes[0], dispatched[0])
            model.up.recipe = recipes[rank]
            refused(lambda: model(X[0], ENDS), made)  # noqa: B023
    model = _shared("mxfp8")
    model(X[0], ENDS)
    other = X[0].bfloat16() if rank else X[0]
    refused(lambda: model(other, ENDS), "[rows of [64] torch.bfloat16 without a gradient]")
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):  # results of other dtypes would travel
        refused(lambda: model(X[0], ENDS), "without a gradient, under autocast to torch.bfloat16]")
    with torch.set_grad_enabled(rank == 0):  # that rank would wait in backward
        refused(lambda: model(X[0], ENDS), "[rows of [64] torch.float32 where no gradient is computed]")
    model.up.recipe = "mxfp8" if rank else "fp8-current"
    refused(lambda: model(X[0], ENDS), "rank 1 has [_Experts.up")


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Experts("mxfp8"), _Experts("mxfp8")

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.a(x, ends) + self.b(x, ends)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("left_out", ["a", "b"])
@on_ranks(2)
def test_experts_that_one_rank_does_not_share_out(rank: int, left_out: str, gpus: bool) -> None:
    """That rank is at its first call, or at the next experts. On GPUs ranks meet in the store."""
    plan = {name: ExpertParallel() for name in "ab" if rank == 0 or name != left_out}
    with mock.patch.object(meeting, "FREE", () if gpus else ("cpu",)):
        made = lpq.convert(_Two(), "mxfp8")
        refused(lambda: parallelize_module(made, mesh_of(), plan)(X[0], ENDS), "rank 0 has [", f"[{left_out}.up: ")
        parallelize_module(lpq.convert(_Two(), "mxfp8"), mesh_of(), dict.fromkeys("ab", ExpertParallel()))(X[0], ENDS)


@on_ranks(2)
def test_experts_are_described_where_something_changed(rank: int) -> None:
    model = _shared("mxfp8")
    model.up.model.stages = Stages(model, 2)

    def times(x: Tensor) -> int:
        with mock.patch.object(alike, "description", wraps=alike.description) as described:
            model(x, ENDS)
        return described.call_count

    assert [times(X[0]), times(X[0]), times(X[0].bfloat16()), times(X[0])] == [1, 0, 1, 0]
    model.up.recipe = "fp8-current"
    assert [times(X[0]), times(X[0])] == [1, 0]
    model.up.model.stages.move(1, changes=False)
    assert [times(X[0]), times(X[0])] == [1, 0]
    assert copy.deepcopy(model.dispatched)._described._layers[0] is not model.up, "a copy describes itself"


@on_ranks(2)
def test_rows_and_gradients_that_one_rank_cannot_encode(rank: int) -> None:
    """A gradient is found so in the middle of backward, where no rank waits for the one that raises; then all go on."""
    model = _shared(_mx("mxfp8"), "encoded")
    y = model(X[0].clone().requires_grad_(), ENDS)
    lines, broken = expert_rows._lines, OSError("this rank's disk is on fire")
    with mock.patch.object(expert_rows, "_lines", side_effect=broken if rank else lines):
        found = agreed(lambda: y.sum().backward(), (OSError, RuntimeError))
    assert found[1] == "OSError: this rank's disk is on fire"
    begins = "RuntimeError: rank 1 could not encode the gradients of the results of experts: OSError: this rank's"
    assert found[0].startswith(begins), found
    model(X[0].clone().requires_grad_(), ENDS).sum().backward()
    if rank == 1:
        model.up.recipe = "mxfp8"
    refused(lambda: model(X[0], ENDS), "rank 1 has [_Experts.up")


# ---------------------------------------------------------------------------------- DistributedDataParallel


@on_ranks(2)
def test_replicas(rank: int) -> None:
    model = DistributedDataParallel(net(("mxfp8", "nvfp4")[rank]))
    refused(lambda: model(X), f"{FIRST} of torch.float32, recipe mxfp8()]", "nvfp4")
    step = training(model := DistributedDataParallel(net(STAGED)))
    for number in (0, 1):
        lpq.set_step(model, number)
        step()
    if rank == 1:
        lpq.set_step(model, 0)
    refused(step, "at step 1 of", "at step 0 of")
    lpq.set_step(model, 2)
    assert [compares(step), compares(step)] == [1, 0]  # the steps, for the last time


@on_ranks(2)
def test_models_that_no_conversion_left(rank: int) -> None:
    """Copies, layers that were made by hand, and models whose weights were prepared for FSDP2."""
    recipe = ("mxfp8", E5M2)[rank]
    by_hand = nn.Sequential(lpq.nn.Linear(64, 128, recipe=recipe))
    prepared = lpq.convert(nn.Sequential(nn.Linear(64, 128)), recipe, weights="high_precision", ranks=2)
    for wrap, models in (
        (DistributedDataParallel, (copy.deepcopy(net(recipe)), by_hand, prepared)),
        (fully_shard, (copy.deepcopy(net(recipe)), copy.deepcopy(by_hand))),
    ):
        for model in models:
            refused(lambda: wrap(model)(X), "Linear with a weight [128, 64]", E5M2)  # noqa: B023


@on_ranks(2)
def test_parts_of_a_model(rank: int) -> None:
    """Which were converted one by one. The heap is not searched for the wrapper."""
    model = DistributedDataParallel(nn.Sequential(net(), net(), net("nvfp4()")))
    step = training(model)
    with mock.patch.object(gc, "get_objects") as sought:
        step()
        step()
    assert not sought.called
    model.module[2][0].recipe = ("mxfp8", "fp8-row")[rank]
    refused(step, "rank 1 has [0: Linear")


@on_ranks(2)
def test_models_of_their_own(rank: int) -> None:
    """Nothing is shared, though another model is: neither raises, and none waits."""
    recipe, shared = ("mxfp8", "nvfp4")[rank], training(DistributedDataParallel(net()))
    training(net(recipe))()
    if rank == 0:
        training(net(STAGED))()
    mixed = nn.ModuleDict({"own": net(recipe), "shared": nn.Linear(64, 64)})
    mixed._ddp_params_and_buffers_to_ignore = [name for name, _ in mixed.named_parameters() if "own" in name]  # type: ignore[assignment]
    torch.optim.SGD(DistributedDataParallel(mixed).parameters()).step()
    shared()


# ---------------------------------------------------------------------------------- several dimensions


@on_ranks(4)
def test_recipes_that_differ_along_one_dimension_alone(rank: int) -> None:
    mesh = mesh_of("dp", "tp")
    for recipe, along_dp in (((E5M2, "mxfp8")[rank % 2], False), ((E5M2, "mxfp8")[rank // 2], True)):
        model = parallel("fp8-row", mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        model[0].recipe = recipe
        refused(lambda: model(X), f"{FIRST} of torch.float32, in high precision, ", E5M2)  # noqa: B023
        step = training(DistributedDataParallel(net(recipe), device_mesh=mesh["dp"]))
        if along_dp:
            refused(step, E5M2)
        else:
            step()  # the other dimension has nothing to do with it


@on_ranks(4)
def test_replicas_of_experts(rank: int) -> None:
    """They exchange no rows, and are compared before they are written to."""
    mesh = mesh_of("dp", "ep")
    model = parallelize_module(_Experts(("mxfp8", "fp8-current")[rank // 2]), mesh["ep"], ExpertParallel())
    fully_shard(model, mesh=mesh["dp"])
    refused(torch.optim.SGD(model.parameters()).step, "[up: GroupedLinear", "fp8(dtype=e5m2)", begins=SAID)


@on_ranks(4)
def test_layers_over_different_ranks(rank: int) -> None:
    """Ranks that share no layer that differs hear of it from those that do, and none waits."""
    mesh, model = mesh_of("dp", "tp"), nn.Sequential(net("fp8-current" if rank == 1 else "mxfp8"), net())
    for part, name in zip(model, ("tp", "dp"), strict=True):
        fully_shard(part, mesh=mesh[name])
    found = agreed(lambda: check_alike(model), RuntimeError)
    assert ["rank 1 has [0.0: " in said for said in found] == [True, True, False, False]
    assert all("say where they differ" in said for said in found[2:])
