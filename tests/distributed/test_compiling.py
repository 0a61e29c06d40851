"""While torch compiles a block, every tensor that it may look at has memory; afterwards what was freed is free."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import spawn
from sharded import How, batch, built
from torch._dynamo.callback import callback_handler

WITH_TWO_OPERANDS = "mxfp8"


def _lent(rank: int, notices: bool) -> None:
    how = How(WITH_TWO_OPERANDS, width=64, inner=128, compile=True, backend="aot_eager")
    net = built(how)
    gathering = net[0].up.gathering
    if not notices:
        gathering._lends = True
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
    assert during
    assert after
    assert any(during) == (not notices), during
    assert any(after)


@pytest.mark.parametrize("notices", [True, False], ids=["lent", "negative control"])
def test_freed_buffers_are_lent_memory(notices: bool) -> None:
    spawn(_lent, 2, notices)
