"""``hybrid(row=A, col=A)`` is ``A``: twenty sharded steps of AdamW, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from ranks import spawn
from sharded import How, train, whole
from torch import nn

from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

STEPS = 20
FORMATS = ["fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "mxfp8", "nvfp4(block=16x16)"]
BLOCKS = ["fp8(scaling=block, block=128x128)"]


def _explicit(text: str) -> str:
    return text if text.endswith(")") else f"{text}()"


def _trained(x: str, w: str, **how: Any) -> tuple[list[float], nn.Sequential]:
    return train(How(f"x={_explicit(x)}, w={_explicit(w)}, dy={_explicit(x)}", **how), STEPS)


def _masters(params: Any) -> MasterWeights:
    return MasterWeights(torch.optim.AdamW(params, lr=1e-2))


def _same(text: str, **how: Any) -> list[float]:
    both = f"hybrid(row={text}, col={text})"
    losses, net = _trained(text, text, **how)
    again, twin = _trained(both, both, **how)
    assert losses == again, (text, how)
    assert losses[-1] < losses[0], (text, losses)
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        a, b = whole(p), whole(q)
        if isinstance(a, QuantizedTensor):
            assert isinstance(b, QuantizedTensor)
            a, b = a.dequantize(), b.dequantize()
        assert torch.equal(a, b), (text, how, name)
    return losses


def _all(rank: int) -> None:
    small: dict[str, Any] = {"width": 64, "inner": 128}
    losses = {text: _same(text, **small) for text in FORMATS}
    losses |= {text: _same(text, inner=256) for text in BLOCKS}
    assert len({tuple(found) for found in losses.values()}) == len(losses)  # no two formats train alike
    for text in ("fp8", "mxfp8"):
        _same(text, weights="quantized", optimizer=_masters, **small)


def test_two_ranks() -> None:
    spawn(_all, 2)
