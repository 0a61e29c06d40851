"""Fused blocks and norms of which tensor parallelism and FSDP2 both share out the weights: the same bits as apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import fully_shard, mesh_of, on_ranks
from sharded import decoded, enough
from support.comparing import equal
from support.passes import nodes_of
from support.small_models import Normed, shared_out
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.tensor_parallel import SequenceParallel

TOKENS = 128
SEVERAL = {
    "rules": [
        {"match": "*.gate_proj", "recipe": "fp8-delayed"},
        {"match": "*.up_proj", "recipe": "mxfp8"},
        {"match": "*", "recipe": "fp8-current"},
    ]
}


def sharded(recipe: Any, weights: Any, sequence: bool, fuse: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(nn.RMSNorm), Normed(nn.RMSNorm)).bfloat16()
    with torch.no_grad():
        model[0].mlp.gate_proj.weight[-1, -1] = 30.0  # on one rank alone
    net: Any = lpq.convert(model, recipe, include="all", weights=weights, fuse=fuse)
    mesh, norm = mesh_of("dp", "tp"), {"norm": SequenceParallel(use_local_output=True)} if sequence else {}
    plan = shared_out(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", 1 if sequence else None)
    for layer in net:
        parallelize_module(layer, mesh["tp"], {**norm, **plan})
    for unit in (*net, net):
        fully_shard(unit, mesh=mesh["dp"])
    return net


def trained(net: nn.Module, recipe: Any, rank: int, sequence: bool) -> tuple[list[Tensor], set[str]]:
    """The outputs, the gradients of inputs, and this rank's parts of the weights and of the states after some steps;
    and the functions that autograd had."""
    optimizer, found, nodes = torch.optim.SGD(net.parameters(), lr=0.1), list[Tensor](), set[str]()
    for step in range(enough(recipe)):
        drawn = torch.Generator().manual_seed(2 * step + rank // 2)  # each pair of ranks has a batch of its own
        x = torch.randn(2, TOKENS, 64, generator=drawn).bfloat16()
        x[1, -1, 3] = 100.0
        x = (x.chunk(2, 1)[rank % 2].contiguous() if sequence else x).requires_grad_()
        torch.manual_seed(step)  # of random bits
        y = net(x)
        nodes = nodes_of(y)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    states = [buffer.clone() for _, buffer in net.named_buffers(remove_duplicate=False)]
    return [*found, *map(decoded, net.parameters()), *states], nodes


@pytest.mark.parametrize(("recipe", "sequence"), [("fp8-current", False), (SEVERAL, True)], ids=["one", "several"])
@on_ranks(4)
def test_training_is_that_of_the_layers_apart(rank: int, recipe: Any, sequence: bool) -> None:
    """``test_fused_tensor_parallel`` has every recipe in both layouts of tokens."""
    for weights in (None, "high_precision"):
        net, other = (sharded(recipe, weights, sequence, fuse) for fuse in (True, False))
        names = ["0.norm", "0.mlp", "1.norm", "1.mlp"]
        assert [entry.name for entry in lpq.report(net).fused] == names, lpq.report(net).apart
        fused, nodes = trained(net, recipe, rank, sequence)
        assert [entry.name for entry in lpq.report(net).fused] == names, lpq.report(net).apart
        assert {"EncodedNormBackward", "FusedMLPBackward"} <= nodes
        apart, others = trained(other, recipe, rank, sequence)
        assert not {"EncodedNormBackward", "FusedMLPBackward"} & others
        assert equal(fused, apart), (recipe, weights)


@on_ranks(2)
def test_norms_before_layers_of_several_formats_by_fsdp_alone(rank: int) -> None:
    """What FSDP2 gathers for a pass, encoded or not, is multiplied by the encoding of its layer's own format."""
    for weights in (None, "high_precision"):
        found = []
        for fuse in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(Normed(nn.RMSNorm), Normed(nn.RMSNorm)).bfloat16()
            net: Any = lpq.convert(model, SEVERAL, include="all", weights=weights, fuse=fuse)
            for unit in (*net, net):
                fully_shard(unit, mesh=mesh_of())
            tensors, nodes = trained(net, "fp8-delayed", 2 * rank, sequence=False)
            notes = {entry.name: entry.note for entry in lpq.report(net).fused}
            assert ({"EncodedNormBackward", "FusedMLPBackward"} <= nodes) == fuse
            assert (["in 2 runs" in notes.get(name, "") for name in ("0.norm", "1.norm")]) == [fuse, fuse]
            found.append(tensors)
        assert equal(*found), weights


class Front(nn.Module):
    """A norm in a unit of its own: its weight is freed when backward of the layers behind it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = lpq.nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


@pytest.mark.parametrize("recipe", ["x=fp8(), w=fp8(), dy=fp8(dtype=e5m2)", "x=mxfp8, w=mxfp8, dy=mxfp8"])
@on_ranks(2)
def test_backward_encodes_the_output_of_a_norm_by_fsdp_alone(rank: int, recipe: str) -> None:
    for weights in (None, "high_precision"):
        found = []
        for fuse, apart in ((False, False), (True, False), (True, True)):
            torch.manual_seed(0)
            model: Any = nn.Sequential(Normed(nn.RMSNorm), Normed(nn.RMSNorm))
            for layer in model if apart else ():
                layer.norm = Front()
            model.bfloat16()
            net: Any = lpq.convert(model, f"{recipe}, x.save=input", include="all", weights=weights, fuse=fuse)
            for layer in net if apart else ():
                layer.norm.norm.consumers = (layer.mlp.gate_proj, layer.mlp.up_proj)
            for unit in (*(layer.norm for layer in net if apart), *net, net):
                fully_shard(unit, mesh=mesh_of())
            tensors, nodes = trained(net, "fp8-current", 2 * rank, sequence=False)
            assert ({"EncodedNormBackward", "FusedMLPBackward"} <= nodes) == fuse
            notes = [entry.note for entry in lpq.report(net).fused if entry.name.endswith("norm")]
            assert ["anew" in note for note in notes] == [True, True] * fuse
            found.append(tensors)
        assert equal(*found[:2]), weights
        assert equal(*found[1:]), weights


@on_ranks(4)
def test_norms_over_ranks_that_share_out_the_layers_keep_the_operand(rank: int) -> None:
    recipe, found = "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input", []
    for fuse in (True, False):
        net = sharded(recipe, None, True, fuse)
        found.append(trained(net, "mxfp8", rank, sequence=True)[0])
        notes = [entry.note for entry in lpq.report(net).fused if entry.name.endswith("norm")]
        assert all("x.save=input has no effect" in note and "as ranks share out" in note for note in notes)
        assert len(notes) == 2 * fuse
    assert equal(*found)
