"""While torch compiles a block, every tensor that it may look at has memory; afterwards what was freed is free.

And whoever counts collectives meanwhile sees them all, and keeps nothing from being compiled.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import on_ranks
from sharded import How, batch, built
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from lpq.distributed import model_gathers
from lpq.distributed.model_gathers import Gathering
from lpq.observe import collectives
from lpq.torch_private import fsdp

WITH_TWO_OPERANDS = "mxfp8"


@pytest.mark.parametrize("notices", [True, False], ids=["lent", "negative control"])
@on_ranks(2)
def test_freed_buffers_are_lent_memory(rank: int, notices: bool) -> None:
    how = How(WITH_TWO_OPERANDS, width=64, inner=128, blocks=1, compile=rank == 0, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_gathers, "PRINTS_GUARDED", notices)  # as the version of torch may have it
        net = built(how)
    gathering = net[0].up.model.fsdp
    during: list[int] = []
    after: list[int] = []

    def started(*_: Any) -> None:
        during.append(len(gathering.missing()))

    def ended(*_: Any) -> None:
        after.append(len(gathering.missing()))

    net[0].unshard()  # now the layers know how they are gathered
    net[0].reshard()
    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)
    net(batch(0, how)).square().mean().backward()
    if rank == 0:
        assert during
        assert after
        assert any(during) == (not notices), during
        assert any(after)


def _registers() -> None:
    how = How(WITH_TWO_OPERANDS, width=64, inner=128)
    nets = []

    def sharded() -> Gathering:
        net = built(how)
        net(batch(0, how)).square().mean().backward()
        nets.append(net)
        gathering: Gathering = net[0].up.model.fsdp
        fsdp.allocate(gathering.of(net[0].up).operands.row.large)  # one operand of two is there
        return gathering

    def registered() -> tuple[int, int]:
        return len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)

    before = registered()
    first = sharded()
    assert registered() == (before[0] + 1, before[1] + 1)
    found = [sharded() for _ in range(4)]
    assert registered() == (before[0] + 1, before[1] + 1)

    missing = [len(gathering.missing()) for gathering in (first, *found)]
    assert all(missing)
    callback_handler.run_start_callbacks(None)
    assert not any(gathering.missing() for gathering in (first, *found)), "it answers for all"
    callback_handler.run_end_callbacks(None)
    assert [len(gathering.missing()) for gathering in (first, *found)] == missing

    gone = weakref.ref(first)
    del first, found
    nets.clear()
    gc.collect()
    assert gone() is None, "what torch calls keeps no gathering"
    earlier = sharded()
    torch._dynamo.reset()
    assert registered() == (0, 0)
    earlier.of(nets[-1][0].up)
    assert registered() == (1, 1), "a model from before asks again"
    last = sharded()
    assert registered() == (1, 1)
    assert last.missing()
    callback_handler.run_start_callbacks(None)
    assert not last.missing()
    callback_handler.run_end_callbacks(None)


@on_ranks(2)
def test_torch_is_asked_once_to_call_however_many_models_there_are(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_gathers, "PRINTS_GUARDED", True)
        _registers()


@on_ranks(2)
def test_collectives_are_counted_while_blocks_are_compiled(rank: int) -> None:
    how = How(WITH_TWO_OPERANDS, width=64, inner=128, blocks=1, backend="aot_eager")
    seen = []
    for compiled in (False, True):
        net = built(replace(how, compile=compiled and rank == 0))
        counters.clear()
        for _ in range(2):
            with collectives() as forward:
                loss = net(batch(0, how)).square().mean()
            with collectives() as backward:
                loss.backward()
            seen.append((forward, backward))
        assert (counters["stats"]["unique_graphs"] > 0) == (compiled and rank == 0)
        loss = net(batch(0, how)).square().mean()  # and where nobody looks
        loss.backward()
    assert len(seen[0][0]) == len(seen[0][1]) // 2 == len(net)  # a gather of each block; in backward gradients, too
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [("fp8-delayed", "high_precision"), ("mxfp8", "quantized")],
)
@on_ranks(2)
def test_blocks_that_are_alike_share_a_graph(rank: int, recipe: str, weights: str) -> None:
    """``tests/nn/test_compiled_alike.py`` has blocks that nobody shards, and a negative control."""
    how = How(recipe, weights, width=64, inner=128, blocks=3, compile=rank == 0, backend="eager", ranks=2)
    counters.clear()
    net = built(how)
    for _ in range(2):
        net(batch(0, how).requires_grad_()).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == (rank == 0)
