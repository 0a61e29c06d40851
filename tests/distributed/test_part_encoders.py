"""Encoders of parts, by kernels and by operators: a rank has of the whole what one process has there, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import counted_format
import pytest
import residual_format
import torch
import torch.distributed as dist
from quantizers import as_bytes
from ranks import spawn
from torch import Tensor

import lpq
from lpq.core import Storage
from lpq.distributed.cuts import Cut
from lpq.distributed.part_encoders import bind_part
from lpq.distributed.part_gathers import bind_gathered
from lpq.operations import reduce_statistics
from lpq.operations.binding import Operand
from lpq.operations.encoder import Encoder, Wanted, bind_encoder, through_operators

ROWS, COLS = 256, 256
TEXTS = (
    "fp8", "fp8(scaling=row)", "fp8(scaling=delayed)", "mxfp8", "nvfp4(stochastic=true)", "identity", "counted",
    "residual(base=fp8, rest=mxfp8)", "hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row)",
    "hybrid(row=nvfp4(stochastic=true), col=fp8, col_source=row)",
)  # fmt: skip
CUTS = (Cut(0, 0, 2, 128), Cut(0, 0, 2, 64, 2), Cut(1, 0, 2, 128))
VALUES = {"outlier": 300.0, "NaN": float("nan")}
BINDS: tuple[Callable[[Wanted], Encoder], ...] = (bind_encoder, through_operators)


def matrix(value: float) -> Tensor:
    """One that has a value on the last rank alone, and zeros of either sign."""
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0], x[1] = 0.0, -0.0
    x[-1, -1] = value
    return x


def own(x: Tensor, cut: Cut) -> Tensor:
    """This rank's part of a matrix."""
    size, ranks = cut.size, cut.ranks
    return torch.cat([x.narrow(cut.dim, (s * ranks + cut.rank) * size, size) for s in range(cut.stretches)], cut.dim)


def part_of(operand: Storage, dim: int, cut: Cut) -> list[Tensor]:
    parts = [operand.narrow(dim, at, at + cut.size) for at in map(cut.place, range(cut.stretches))]
    assert None not in parts
    together = zip(*(p.tensors() for p in parts if p is not None), operand.quantizer.layout, strict=True)
    return [pieces[0] if buffer.unit(dim) is None else torch.cat(pieces, dim) for *pieces, buffer in together]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(found, expected, strict=True))


def of_all(stats: Sequence[Tensor]) -> list[Tensor]:
    """Statistics of the whole matrix."""
    return [stat for stat in stats if not stat.dim()]


def different(text: str, value: float) -> set[tuple[int, int, str]]:
    """Which operands of parts, or gathered ones, are not those of the whole."""
    quantizer, x, seed = lpq.quantizer(text), matrix(value), torch.tensor(7) << 33
    state = quantizer.new_state()
    for memory in state.values():
        memory.fill_(50.0)
    known, device, wrong = state or None, x.device, set()
    group: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
    wanted = Wanted(quantizer, (ROWS, COLS), x.dtype, device, remembers=bool(state))
    whole = bind_encoder(wanted)
    row, col, stats = whole.encode(x, known, seed)
    assert whole.row is not None
    assert whole.col is not None
    of_row, of_col = whole.row.over(row), whole.col.over(col)
    for which, shape in enumerate(CUTS):
        cut = shape._replace(rank=dist.get_rank())
        if cut.why_not(quantizer, True, True) is not None:
            continue
        mine = own(x, cut)
        here = wanted._replace(shape=(mine.shape[0], mine.shape[1]))
        for how, bind in enumerate(BINDS):
            made = bind_part(bind, here, cut, group).alone(group).encode(mine, known, seed)
            if not same(made[0], part_of(of_row, cut.dim, cut)) or not same(of_all(made[2]), of_all(stats)):
                wrong.add((which, how, "row"))
            if not same(made[1], part_of(of_col, 1 - cut.dim, cut)):
                wrong.add((which, how, "col"))
            side = quantizer.side("col")
            if cut.dim == 1 or (quantizer.col_source == "row" and (side.state or side.stochastic)):
                continue
            for at_once in (False, True):
                gathered = bind_gathered(bind, here, cut, group, at_once=at_once).alone(group)
                arriving, kept, _ = gathered.encode(mine, known, seed)
                kept = kept if gathered.begin is None else gathered.begin(kept)
                assert gathered.later is not None
                results: tuple[tuple[Operand | None, Any, Storage], ...] = (
                    (gathered.row, arriving.now(), of_row), (gathered.col, gathered.later(kept), of_col)
                )  # fmt: skip
                for operand, buffers, expected in results:
                    assert operand is not None
                    if operand.shape != expected.shape or not same(buffers, expected.tensors()):
                        wrong.add((which, how, "gathered"))
    return wrong


def _as_the_whole(rank: int) -> None:
    for formats in (counted_format, residual_format):
        formats.register()
    found = {(text, name): different(text, value) for text in TEXTS for name, value in VALUES.items()}
    wrong = {which: wrong for which, wrong in found.items() if wrong}
    assert wrong == {}, wrong


def test_a_part_is_encoded_as_it_is_in_the_whole() -> None:
    spawn(_as_the_whole, 2)


def _without_reductions(rank: int) -> None:
    counted_format.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_statistics, "reduce_max", lambda values, group: list(values))
        for text in ("fp8", "nvfp4(block=16x16)", "counted"):
            # The last rank has the outlier, and gathers codes that the other one made by a scale of its own.
            assert {how for _, how, _ in different(text, 300.0)} == {0, 1}, text
        # Where a state recalls the scale, only what is measured for it is another one's.
        assert bool(different("fp8(scaling=delayed)", 300.0)) == (rank == 0)
        assert different("mxfp8", 300.0) == set()  # where nothing spans ranks


def test_what_is_not_reduced_is_noticed() -> None:
    spawn(_without_reductions, 2)
