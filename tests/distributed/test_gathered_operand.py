"""Shares that arrive rank by rank become the whole weight's operand, in words as wide as the ranks' shares allow."""

from __future__ import annotations

import pytest
import torch
from support.comparing import equal_bytes

import lpq
from lpq.distributed.gathered_operand import GatheredOperand, _unit, sent_bytes
from lpq.operations.quantizing import quantize
from lpq.torch_private import fsdp


@pytest.mark.parametrize("text", ["fp8(scaling=row)", "fp8(scaling=block)", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("rows", "ranks"), [(768, 2), (384, 3), (1024, 8)])
@pytest.mark.parametrize("direction", ["row", "col"])
@pytest.mark.parametrize("flat", [True, False], ids=["in one tensor", "apart"])
def test_the_shares_of_all_ranks_make_the_whole(text: str, rows: int, ranks: int, direction: str, flat: bool) -> None:
    side = lpq.quantizer(text).side(direction)
    x, cpu = torch.randn(rows, 80), torch.device("cpu")
    stats = [torch.full(s.grid(*(x.shape if direction == "row" else x.t().shape)), 4.0) for s in side.stats]
    dim = 0 if direction == "row" else 1
    shared = [[s.chunk(ranks, dim)[r] if s.dim() and s.shape[dim] > 1 else s for s in stats] for r in range(ranks)]

    def encoded(part: torch.Tensor, known: list[torch.Tensor]) -> list[torch.Tensor]:
        made = quantize(part, known, *((side, None) if direction == "row" else (None, side)))
        operand = made[0] if direction == "row" else made[1]
        assert operand is not None
        return operand.tensors()

    parts = [encoded(part, known) for part, known in zip(x.chunk(ranks), shared, strict=True)]
    whole = GatheredOperand(direction, side, (rows, 80), ranks, x.dtype, cpu)  # type: ignore[arg-type]
    sent = [sent_bytes((whole, part[i]) for i in whole.travels) for part in parts]
    if flat:
        arrived = list(torch.stack([torch.cat(each) for each in sent]).split([t.numel() for t in sent[0]], 1))
    else:
        fsdp.allocate(into := whole.arrivals())
        for to, each in zip(into, zip(*sent, strict=True), strict=True):
            to.copy_(torch.cat(each))
        arrived = [] if whole.in_place else [t.view(ranks, -1) for t in into]
    fsdp.allocate(whole.large)
    for to, at in whole.places(arrived) if arrived else ():
        to.copy_(at)
    for i in whole.stays:
        whole.targets[i].copy_(parts[0][i])
    expected = encoded(x, stats)
    assert equal_bytes(whole.operand.tensors(), expected)


def test_the_widest_unit_is_taken() -> None:
    assert [_unit(n).itemsize for n in (0, 1, 2, 12, 24, 48, 7168)] == [16, 1, 2, 4, 8, 16, 16]
