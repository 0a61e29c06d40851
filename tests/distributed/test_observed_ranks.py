"""Observers where ranks share a model out: they are told of parts, with the statistics of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import fully_shard, mesh_of, on_one, on_ranks
from support.comparing import equal
from support.small_models import Gated, gated_plan
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.nn import GroupedLinear
from lpq.observe import Observed, observing
from lpq.torch_private.tensors import local_part

WIDTH, INNER, BATCH, TOKENS, RANKS = 64, 256, 2, 64, 2
HIGH = "x=mxfp8, w=mxfp8, dy=fp8(scaling=block)"
"""Its blocks of dy have more rows than a rank has tokens of a sequence."""
Found = dict[str, tuple[dict[str, Tensor], list[Tensor], bool]]


class Take:
    """Statistics and decoded operands of each tensor, and whether it is a part."""

    def __init__(self) -> None:
        self.found: Found = {}

    def observe(self, seen: Observed) -> None:
        layer: Any = seen.layer
        if seen.name != "y":
            for part in seen.groups():
                name = ".".join(str(n) for n in (layer.qualified_name, seen.name, part.group) if n is not None)
                operands = [operand for operand in part.decoded() if operand is not None]
                self.found[name] = part.statistics(), operands, part.is_part


def model(recipe: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return lpq.convert(Gated(WIDTH, INNER), recipe, **options)


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=draw)
    x[1, TOKENS - 1, 3] = 500.0  # on the last rank only, where the sequence is shared out
    return x, torch.randn(BATCH, TOKENS, WIDTH, generator=draw)


def seen_in(net: Any, x: Tensor, dy: Tensor) -> Found:
    with observing(net, Take()) as take:
        net(x).backward(dy)
    return take.found


def _alone(recipe: str) -> Found:
    return seen_in(model(recipe), *data())


def own(whole: Tensor, part: Tensor, rank: int) -> Tensor:
    """This rank's part of a matrix, as ranks share out features, or the tokens of each sequence."""
    if whole.shape == part.shape:
        return whole
    if whole.shape[1] != part.shape[1]:
        return whole.chunk(RANKS, 1)[rank]
    if whole.shape[0] == BATCH * TOKENS:
        return whole.view(BATCH, TOKENS, -1).chunk(RANKS, 1)[rank].flatten(0, 1)
    return whole.chunk(RANKS, 0)[rank]


@pytest.mark.parametrize(
    ("recipe", "sequence"),
    [("fp8-current", False), ("fp8-delayed", False), ("fp8-delayed", True), (HIGH, True), ("nvfp4", True)],
)
@on_ranks(RANKS)
def test_ranks_of_tensor_parallelism_see_their_parts_of_what_one_process_sees(
    rank: int, recipe: str, sequence: bool
) -> None:
    expected: Found = on_one(_alone, recipe)
    net = parallelize_module(model(recipe), mesh_of(), gated_plan(sequence))
    x, dy = (t.chunk(RANKS, 1)[rank] if sequence else t for t in data())
    found = seen_in(net, x, dy)
    assert found.keys() == expected.keys()
    assert len(found) == 9
    for name, (statistics, operands, is_part) in found.items():
        of_whole, decoded, _ = expected[name]
        for key, value in statistics.items():
            if value.numel() == 1:
                assert torch.equal(value, of_whole[key]), (name, key)
        assert len(operands) == 2
        for operand, whole in zip(operands, decoded, strict=True):
            drawn = recipe == "nvfp4" and name.endswith("dy")  # with random bits of this run
            assert torch.equal(operand, own(whole, operand, rank)) or drawn, name
            assert is_part == (operand.shape != whole.shape)
    assert found["left.w"][2]
    assert found["left.x"][2] == sequence
    assert found["down.dy"][2] == (sequence and recipe != HIGH), "whole where it is gathered in high precision"
    assert not any(m.passes.observers for m in net.modules() if isinstance(m, lpq.nn.Layer))


@pytest.mark.parametrize(
    ("recipe", "weights"), [("fp8-current", None), ("mxfp8", "high_precision"), ("fp8-current", "quantized")]
)
@on_ranks(RANKS)
def test_ranks_of_fsdp2_see_what_one_process_sees(rank: int, recipe: str, weights: Any) -> None:
    net = model(recipe, weights=weights, ranks=None if weights is None else RANKS)
    fully_shard(net)
    alone = model(recipe, weights=None)
    x, dy = data()[0][rank : rank + 1], data()[1][rank : rank + 1]
    expected, found = seen_in(alone, x, dy), seen_in(net, x, dy)
    assert found.keys() == expected.keys()
    assert len(found) == 9
    for name, (statistics, operands, _) in found.items():
        if weights is None or ".w" not in name:
            assert {k: v.tolist() for k, v in statistics.items()} == {
                k: v.tolist() for k, v in expected[name][0].items()
            }
        for operand, same in zip(operands, expected[name][1], strict=False):
            assert torch.equal(operand, same), name
        assert operands


@on_ranks(RANKS)
def test_ranks_of_a_compiled_model_see_what_an_eager_one_sees(rank: int) -> None:
    """Compiled code that ran before the block runs eagerly in it, on all ranks."""
    x, dy = data()
    found = []
    for compiled in (False, True):
        net = fully_shard(model("fp8-current", weights="high_precision"))
        if compiled:
            net.compile(backend="aot_eager")
            net(x).backward(dy)
        found.append(seen_in(net, x, dy))
        if compiled:
            with torch.compiler.set_stance("fail_on_recompile"):
                net(x).backward(dy)
    eager, watched = found
    assert eager.keys() == watched.keys()
    assert len(eager) == 9
    for name, (statistics, operands, is_part) in eager.items():
        assert statistics == watched[name][0], name
        assert equal(operands, watched[name][1]), name
        assert is_part == watched[name][2]


@on_ranks(RANKS)
def test_ranks_with_experts_see_their_own(rank: int) -> None:
    """Each rank is told of its own experts, by their numbers among all, with the rows of all ranks."""
    torch.manual_seed(0)
    alone, net = (GroupedLinear(4, WIDTH, INNER, recipe="fp8-current") for _ in range(2))
    net.load_state_dict(alone.state_dict())
    x, counts = torch.randn(24, WIDTH), [6, 2, 0, 4]
    with observing(alone, Take()) as one:
        rows = [torch.cat([half.split(counts)[i] for half in x.chunk(2)]) for i in range(4)]
        alone(torch.cat(rows), [2 * count for count in counts]).sum().backward()
    parallelize_module(net, mesh_of(), ExpertParallel())
    with observing(net, Take()) as take:
        net(x.chunk(2)[rank], counts).sum().backward()
    mine = {name: found for name, found in one.found.items() if int(name[-1]) // 2 == rank}
    assert take.found.keys() == mine.keys() != set()
    for name, (statistics, operands, _) in take.found.items():
        assert statistics == mine[name][0], name
        assert equal(operands, mine[name][1])
    assert local_part(net.weight).shape[0] == 2
