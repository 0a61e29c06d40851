"""Hugging Face's fused experts, shared out by expert parallelism: to the bit what one process computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, spawn
from test_experts import COUNT, HIDDEN, WORDS, experts_of, made
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.expert_parallel import ExpertParallel

TOKENS, RANKS = 10, 4
ENCODED = "x=hybrid(row=mxfp8, col=mxfp8, col_source=row), w=mxfp8(), dy=hybrid(row=mxfp8, col=mxfp8, col_source=row)"
CASES = [
    ("Mixtral", "mxfp8", "high_precision"), ("Mixtral", ENCODED, "encoded"),
    ("GptOss", "fp8-current", "high_precision"), ("GptOss", ENCODED, "encoded"),
    ("Llama4", "mxfp8", "high_precision"), ("Qwen3Moe", ENCODED, "encoded"),
]  # fmt: skip


def given(ranks: range) -> tuple[tuple[Tensor, ...], Tensor]:
    """The arguments of experts for the tokens of these ranks, and the gradients of their results."""
    parts = []
    for rank in ranks:
        draw = torch.Generator().manual_seed(rank)
        x, dy = (torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16() for _ in range(2))
        index = torch.stack([torch.randperm(COUNT - 1, generator=draw)[:2] for _ in range(TOKENS)])
        parts.append((x, index, torch.rand(TOKENS, 2, generator=draw).bfloat16(), dy))
    x, index, weights, dy = (torch.cat(each) for each in zip(*parts, strict=True))
    return (x, index, weights), dy


def given_densely(ranks: range) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same of experts that are each given rows for all tokens."""
    parts = []
    for rank in ranks:
        draw = torch.Generator().manual_seed(rank)
        parts.append(torch.randn(2, COUNT, TOKENS, HIDDEN, generator=draw).bfloat16())
    x, dy = torch.cat(parts, 2).flatten(1, 2)
    return (x,), dy


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _alike(rank: int, case: int, replicas: int) -> None:
    """Results and gradients, where so many replicas of the experts are sharded by FSDP2."""
    model, recipe, dispatch = CASES[case]
    draw = given_densely if model == "Llama4" else given
    alone = experts_of(lpq.convert(made(model), recipe))[0]
    shared = copy.deepcopy(alone)
    names = [(k, v.shape) for k, v in alone.state_dict().items()]
    ranks = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "ep"))
    if ranks > 1:
        parallelize_module(shared, mesh["ep"], ExpertParallel(dispatch=dispatch))
    if replicas > 1:
        fully_shard(shared, mesh=mesh["dp"])
    assert [(k, v.shape) for k, v in shared.state_dict().items()] == names
    mine, dy = draw(range(rank, rank + 1))
    own = mine[0].clone().requires_grad_()
    y = shared(own, *mine[1:])
    y.backward(dy)
    for replica in range(replicas):
        members = range(replica * ranks, (replica + 1) * ranks)
        (x, *rest), gradient = draw(members)
        x.requires_grad_()
        expected = alone(x, *rest)
        expected.backward(gradient)
        assert x.grad is not None
        assert own.grad is not None
        if rank in members:
            for ours, theirs in ((y, expected), (own.grad, x.grad)):
                of_all = theirs.view(-1, ranks, TOKENS, HIDDEN)  # of each expert, where these are given rows densely
                assert torch.equal(ours, of_all[:, rank - members[0]].flatten(0, 1))
    for (name, one), part in zip(alone.named_parameters(), shared.parameters(), strict=True):
        assert torch.equal(whole(part.grad), one.grad / replicas), name  # FSDP2 has the mean of replicas


@pytest.mark.parametrize(("case", "replicas"), [(0, 1), (0, 2), (1, 2), (2, 1), (3, 1), (4, 2), (5, 1)])
def test_experts_over_ranks(case: int, replicas: int) -> None:
    spawn(_alike, RANKS, case, replicas)


@pytest.mark.parametrize("case", [0, 2, 4])
def test_experts_that_fsdp_shards(case: int) -> None:
    spawn(_alike, 2, case, 2)


@pytest.mark.parametrize("divided", [True, False])
@on_ranks(RANKS)
def test_a_model_whose_experts_and_rest_lie_over_other_ranks(rank: int, divided: bool) -> None:
    """Experts over ``ep`` and ``dp``, all else over all ranks: gradients are those of one process, if those of experts
    are divided by all ranks."""
    alone = lpq.convert(made("Mixtral").float(), "mxfp8")
    model = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for layer in model.model.layers:
        experts = layer.mlp.experts
        parallelize_module(experts, mesh["ep"], ExpertParallel())
        fully_shard(experts, mesh=mesh["dp"])
        if divided:
            experts.set_gradient_divide_factor(RANKS)
            experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer)
    fully_shard(model)
    words = torch.randint(WORDS, (RANKS, 12), generator=torch.Generator().manual_seed(3))
    alone(input_ids=words, labels=words).loss.backward()
    model(input_ids=words[rank : rank + 1], labels=words[rank : rank + 1]).loss.backward()
    for (name, one), part in zip(alone.named_parameters(), model.parameters(), strict=True):
        factor = 1 if divided or ".experts." not in name else 2
        assert torch.allclose(whole(part.grad), factor * one.grad, atol=1e-5, rtol=1e-4), name


@on_ranks(RANKS)
def test_experts_that_are_not_converted_are_refused(rank: int) -> None:
    experts = experts_of(made("Mixtral"))[0]
    parallelize_module(experts, init_device_mesh("cpu", (RANKS,)), ExpertParallel())
    with pytest.raises(TypeError, match=r"was called with 3 arguments, .* convert one that routes tokens itself"):
        experts(*given(range(1))[0])


@on_ranks(RANKS)
def test_a_model_with_experts_over_ranks(rank: int) -> None:
    """A whole model, of which the rest is replicated: loss and gradients are those of one process."""
    alone = lpq.convert(made("Mixtral").float(), "identity()")
    model = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (RANKS,))
    for experts in experts_of(model):
        parallelize_module(experts, mesh, ExpertParallel())
    words = torch.randint(WORDS, (RANKS, 12), generator=torch.Generator().manual_seed(3))
    expected = alone(input_ids=words, labels=words).loss
    expected.backward()
    loss = model(input_ids=words[rank : rank + 1], labels=words[rank : rank + 1]).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert torch.allclose(total / RANKS, expected, atol=1e-5)
    for (name, one), part in zip(alone.named_parameters(), model.parameters(), strict=True):
        gradient = part.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):  # the sum over the ranks already
            gradient = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        assert torch.allclose(gradient / RANKS, one.grad, atol=1e-5), name
