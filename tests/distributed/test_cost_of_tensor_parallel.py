"""The cost of tensor parallelism to the host: Python calls of lpq, operators that torch dispatches and collectives, and
not time, with a GPU that does nothing.

What is counted is one forward and backward of a pair of layers, the first shared out by columns and the second by rows,
as in a feed-forward block: with activations that all ranks have, and with sequences that are shared out. The numbers
may only fall: where there are fewer, lower the number, and where one must rise, say why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from imitated_gpu import calls_of, imitated_gpu
from ranks import on_ranks
from support.small_models import shared_out
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.distributed import meeting
from lpq.distributed import tensor_parallel as tp
from lpq.kernels.fresh import fresh
from lpq.nn import parallel_step
from lpq.observe import collectives
from lpq.registry import refresh

WIDTH, INNER, TOKENS, WARM = 256, 512, 256, 3


class Cost(NamedTuple):
    """What one forward and backward of the pair costs."""

    calls: int
    operators: int
    collectives: int


PAIR = {
    # recipe: activations that all ranks have, sequences that are shared out. As torch 2.13 counts them.
    "fp8-current": (Cost(129, 107, 5), Cost(191, 240, 9)),
    "fp8-delayed": (Cost(134, 73, 4), Cost(177, 181, 7)),
    "fp8-row": (Cost(135, 99, 5), Cost(201, 330, 10)),
    "mxfp8": (Cost(105, 43, 2), Cost(161, 342, 6)),
}


FUSED = {
    # The same of a norm and a SwiGLU behind it, fused.
    "fp8-current": (Cost(275, 149, 7), Cost(367, 310, 11)),
    "fp8-delayed": (Cost(281, 107, 6), Cost(364, 300, 11)),
    "mxfp8": (Cost(230, 60, 2), Cost(308, 373, 6)),
}


def cost(recipe: str, sequences: bool) -> Cost:
    """The cost of a pair."""
    pair = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)).bfloat16()
    lpq.convert(pair, recipe)
    ranks = dist.get_world_size()
    parallelize_module(pair, init_device_mesh("cpu", (ranks,)), shared_out(["0"], "1", 0 if sequences else None))
    return cost_of(pair, sequences)


def cost_of_block(recipe: str, sequences: bool) -> Cost:
    """The cost of a norm and a SwiGLU, which are fused."""
    block = nn.Sequential(nn.RMSNorm(WIDTH), lpq.nn.SwiGLU(WIDTH, INNER)).bfloat16()
    lpq.convert(block, recipe, fuse=True)
    styles = shared_out(["1.gate_proj", "1.up_proj"], "1.down_proj", 0 if sequences else None)
    if sequences:
        styles["0"] = tp.SequenceParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
    return cost_of(block, sequences)


def cost_of(pair: nn.Module, sequences: bool) -> Cost:
    """The cost of these layers."""
    ranks = dist.get_world_size()
    rows = TOKENS // ranks if sequences else TOKENS
    x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        pair(x).backward(dy)

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM):  # what is looked up once is looked up before
            step()
        calls = calls_of(step)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        with collectives() as sent:
            step()
    return Cost(calls, sum(e.name.startswith(("aten::", "lpq::")) for e in seen.events()), len(sent))


@pytest.mark.parametrize(("recipe", "fused"), [*((recipe, False) for recipe in PAIR), *((one, True) for one in FUSED)])
@on_ranks(2)
def test_no_call_no_operator_and_no_collective_is_added(rank: int, recipe: str, fused: bool) -> None:
    costs, of = (FUSED, cost_of_block) if fused else (PAIR, cost)
    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "FREE", ())  # on a GPU ranks compare new inputs alone
        found = of(recipe, False), of(recipe, True)
    for now, most in zip(found, costs[recipe], strict=True):
        assert all(a <= b for a, b in zip(now, most, strict=True)), found
        assert now.calls > 0.95 * most.calls - 1, f"lower the number: {found}"


@on_ranks(2)
def test_what_is_added_is_noticed(rank: int) -> None:
    bind, spare = parallel_step.bind_part, torch.zeros(1)

    def dearer(*args: Any) -> Any:
        part = bind(*args)

        def encode(*given: Any) -> Any:
            spare.detach()
            fresh((1,), torch.float32)
            dist.all_reduce(spare)
            return part.encoder.encode(*given)

        return part._replace(encoder=part.encoder._replace(encode=encode))

    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        usual = cost("mxfp8", False)
        patch.setattr(parallel_step, "bind_part", dearer)
        refresh()
        found = cost("mxfp8", False)
    refresh()
    assert all(now > before for now, before in zip(found, usual, strict=True)), found
