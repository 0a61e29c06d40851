"""Fused blocks and norms of which ranks share out the layers are, to the bit, the layers one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import mesh_of, on_ranks
from support.comparing import equal
from support.small_models import LlamaMlp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp

RECIPES = (
    "fp8-current", "fp8-delayed", "fp8-row", "mxfp8", "nvfp4", "nvfp4()", "fprop=mxfp8, dgrad=nvfp4(), wgrad=fp8()",
    "x=hybrid(row=mxfp8, col=fp8, col_source=row), w=mxfp8, dy=fp8",
)  # fmt: skip
BATCH, TOKENS, WIDTH = 2, 128, 64


def plan(sequence: bool) -> dict[str, Any]:
    column = tp.ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate())
    row = tp.RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    return {"gate_proj": column, "up_proj": column, "down_proj": row}


def mlp(recipe: str, sequence: bool, fuse: bool, bias: bool = False) -> Any:
    torch.manual_seed(0)
    net = LlamaMlp(WIDTH)
    if bias:
        net.gate_proj, net.up_proj = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128)
        net.down_proj = nn.Linear(128, WIDTH)
    lpq.convert(net, recipe, include="all", fuse=fuse)
    return parallelize_module(net, mesh_of(), plan(sequence))


def part(sequence: bool, step: int) -> tuple[Tensor, Tensor]:
    """This rank's input and gradient of a step."""
    drawn = torch.Generator().manual_seed(step)
    x, dy = (torch.randn(BATCH, TOKENS, WIDTH, generator=drawn) * (1 + step) for _ in range(2))
    x[1, TOKENS - 1, 3] = 100.0  # on the last rank only, where the sequence is shared out
    if sequence:
        x, dy = (t.chunk(2, 1)[dist.get_rank()].contiguous() for t in (x, dy))
    return x, dy


def nodes_of(y: Tensor) -> set[str]:
    """The names of the functions that autograd has behind a tensor."""
    nodes, seen = [y.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [n for n, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def run(net: nn.Module, sequence: bool, steps: int = 3) -> tuple[list[Tensor], set[str]]:
    """Outputs, gradients and states of some steps; and the functions that autograd had."""
    found, nodes = list[Tensor](), set[str]()
    for step in range(steps):
        net.zero_grad()
        x, dy = part(sequence, step)
        torch.manual_seed(step)  # of random bits
        leaf = x.requires_grad_()
        y = net(leaf * 1.0)
        nodes = nodes_of(y)
        y.backward(dy)
        assert leaf.grad is not None
        grads = [p.grad for p in net.parameters()]
        states = [b.clone() for b in net.buffers()]
        found += [y.detach(), leaf.grad]
        found += [t.to_local() if isinstance(t, DTensor) else t for t in (*grads, *states) if t is not None]
    return found, nodes


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_a_block_is_its_layers(rank: int, recipe: str, sequence: bool) -> None:
    for bias in (False, True):
        (fused, nodes), (apart, others) = (run(mlp(recipe, sequence, fuse, bias), sequence) for fuse in (True, False))
        assert "FusedMLPBackward" in nodes
        assert "FusedMLPBackward" not in others
        assert equal(fused, apart), recipe
