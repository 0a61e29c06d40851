"""Parts of a tensor: ``encode(part) == part(encode(whole))`` where its rows or its columns are divided over ranks.

Ranks are threads here, and run what ranks run, collectives included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lpq.distributed.part_gathers import OperandGather, gathering, sent_part
from lpq.formats import Quantizer, Storage
from lpq.formats.format import Direction
from lpq.formats.sections import cat
from lpq.operations.binding import operand_like
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import made_at_use, rounds_stochastically
from lpq.operations.encoder import BindEncoder, EncoderSpec, KnownStats, bind_encoder, through_operators
from lpq.operations.operands import encode_operands
from lpq.operations.part_encoders import bind_exchange, bind_part, bind_settle
from lpq.operations.states import remember
from lpq.testing.conformance.test_parts import part_that_differs
from lpq.testing.expect import one_nan, same, same_decoded, same_operand, there
from lpq.testing.operands import SEED, normal, unit
from lpq.testing.ranks import Rank, on_ranks
from lpq.testing.table import DTYPES

WAYS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "rows": ((0, 2, 1, 1), (0, 3, 2, 1), (0, 4, 1, 1), (0, 2, 0, 1)),
    "chunks of rows": ((0, 2, 1, 3), (0, 3, 1, 2)),
    "columns": ((1, 2, 1, 1), (1, 3, 1, 1), (1, 4, 2, 1)),
}
"""The dimension that is divided over ranks; the number of ranks; the size of a chunk, in blocks that must stay whole;
and how many chunks each has."""
BINDS: tuple[BindEncoder, ...] = (bind_encoder, through_operators)
"""How encoders are bound: by kernels, or by operators where a compiler or a mode watches."""
KNOWN = 7.0
"""A statistic that does not move."""
State = Mapping[str, Tensor]


class PassCase(NamedTuple):
    """One time that a tensor is encoded, and the operands that are wanted."""

    quantizer: Quantizer
    row: bool
    col: bool
    state: State

    def operands(self, dim: int) -> list[tuple[Direction, int]]:
        """The wanted operands, each with the dimension along which it is divided if the tensor is divided along
        ``dim``."""
        of_row: list[tuple[Direction, int]] = [("row", dim)]
        of_col: list[tuple[Direction, int]] = [("col", 1 - dim)]
        return of_row * self.row + of_col * self.col

    def encode(self, x: Tensor, seed: Tensor, group: Rank | None = None, begin: int = 0) -> Result:
        """Encode a tensor, or some of its rows from ``begin`` on."""
        pair = encode_operands(
            self.quantizer, x, row=self.row, col=self.col, state=self.state or None, seed=seed, group=group,
            offset=begin,
        )  # fmt: skip
        return Result({"row": pair.row, "col": pair.col}, self.after(pair.measured, group))

    def encoder_spec(self, local: Tensor) -> EncoderSpec:
        """How a rank has its part encoded."""
        rows, cols = local.shape
        return EncoderSpec(
            self.quantizer, (rows, cols), local.dtype, local.device, self.row, self.col, bool(self.state)
        )

    def after(self, measured: list[Tensor], group: Rank | None = None) -> State:
        """The state after a pass with these measured statistics."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        if state:
            remember(self.quantizer, state, measured, row=self.row, col=self.col, group=group)
        return state


class Result(NamedTuple):
    """The operands that a pass makes, and the state afterwards."""

    operands: dict[Direction, Storage | None]
    state: State
    gathered: Mapping[Direction, Storage] = {}

    def of(self, direction: Direction) -> Storage:
        """An operand that was asked for."""
        return there(self.operands[direction], f"the {direction} operand")


def passes(quantizer: Quantizer, x: Tensor) -> list[PassCase]:
    """With both operands and with each alone; from a fresh state, from a used one, and with one that does not move."""
    fresh, static = quantizer.new_state(), quantizer.frozen()
    first = PassCase(quantizer, True, True, fresh)
    later_state = first.encode(x * 3, torch.tensor(SEED)).state if fresh else {}
    cases = [first, PassCase(quantizer, True, False, later_state), PassCase(quantizer, False, True, later_state)]
    static_state = {} if fresh else {name: torch.full_like(value, KNOWN) for name, value in static.new_state().items()}
    return [*cases, PassCase(static, True, True, static_state)] if static_state else cases


@pytest.mark.parametrize("way", WAYS)
def test_ranks_encode_parts_as_in_the_whole(quantizer: Quantizer, way: str) -> None:
    """Operands that ranks encode of their parts are parts of the operands of the whole. Gathered they are the whole
    operands, and ranks remember what one process remembers. A cut through what must stay whole is refused."""
    row, col = quantizer.side("row"), quantizer.side("col")
    for number, (dim, ranks, blocks, chunks) in enumerate(WAYS[way]):
        block = math.lcm(unit(row, dim), unit(col, 1 - dim))
        sizes = [blocks * block, block + 1] if number == 0 and block > 1 else [blocks * block]
        for size in sizes:
            length = ranks * size * chunks
            x = normal(*((length, 40) if dim == 0 else (40, length)), dtype=DTYPES[number % 3])
            pieces = torch.split(x, size, dim) if size else (x,) * ranks
            holds = part_that_differs(x, pieces, number)
            mine = [torch.cat(pieces[rank::ranks], dim) for rank in range(ranks)]
            cuts = [Cut(dim, rank, ranks, size, chunks) for rank in range(ranks)]
            what = f"{quantizer}: {chunks} × {size} {way} of each of {ranks} ranks, in {x.dtype}, with {holds}"
            first, *others = passes(quantizer, x)
            _check(first, x, mine, cuts, what, BINDS if number == 0 else BINDS[:1])
            for one in others if number == 0 else ():
                _check(one, x, mine, cuts, what, BINDS[:1])


def _check(
    one: PassCase, x: Tensor, mine: Sequence[Tensor], cuts: Sequence[Cut], what: str, binds: Sequence[BindEncoder]
) -> None:
    """Check one pass over a tensor that is divided over the ranks into these parts."""
    (dim, _, _, _, chunks), (quantizer, row, col, _) = cuts[0], one
    random, shards = rounds_stochastically(quantizer), dim == 0 and chunks == 1
    operands = one.operands(dim)

    def encode(cut: Cut, local: Tensor, group: Rank) -> tuple[Tensor, list[Result]]:
        seed, results = torch.tensor(SEED), []
        for at_once, bind in enumerate(binds):
            seed, outcomes = of_part(one, bind, cut, local, group.group_name)
            whole = gathered(one, bind, cut, local, seed, group.group_name, outcomes, at_once=bool(at_once))
            results.append(outcomes._replace(gathered=whole))
        return seed, results + ([one.encode(local, seed, group, cut.place(0))] if shards else [])

    def shard(local: Tensor, group: Rank) -> Result:
        return one.encode(local, torch.tensor(SEED), group)

    whole = one.encode(x, torch.tensor(SEED))
    reason = cuts[0].why_not(quantizer, row, col)
    if any(_part(whole.of(at), along, cut) is None for at, along in operands for cut in cuts):
        assert reason is not None, f"{what}: they cut what must stay whole, and Cut.why_not does not say so"
        if shards:
            with pytest.raises(ValueError, match="shard"):
                on_ranks([partial(shard, local) for local in mine])
    if reason is not None:
        return
    outcomes = on_ranks([partial(encode, cut, local) for cut, local in zip(cuts, mine, strict=True)])
    seed, _ = outcomes[0]
    whole = one.encode(x, seed) if random else whole
    compare = same_operand if x.isfinite().all() else same_decoded
    for (_, results), cut in zip(outcomes, cuts, strict=True):
        for (at, along), result in itertools.product(operands, results):
            expected = there(_part(whole.of(at), along, cut), f"{what}: a part of the {at} operand")
            compare(result.of(at), expected, f"{what}: {at} operand of rank {cut.rank}")
            if at in result.gathered:
                compare(result.gathered[at], whole.of(at), f"{what}: {at} operand, gathered by rank {cut.rank}")
        for (name, value), result in itertools.product(whole.state.items(), results):
            same(one_nan(result.state[name]), one_nan(value), f"{what}: what rank {cut.rank} remembers as {name!r}")


def of_part(one: PassCase, bind: BindEncoder, cut: Cut, local: Tensor, group: str) -> tuple[Tensor, Result]:
    """Encode a part with exchanged statistics; return the seed that all ranks have, too."""
    part = bind_part(bind, one.encoder_spec(local), cut, group)
    encoder, settle = part.encoder, bind_settle([part], group)
    own_seed = torch.tensor([SEED + cut.rank]) if rounds_stochastically(one.quantizer) else None
    (stats,), common = bind_exchange([part.statistics], group)([local], own_seed)
    source = KnownStats(stats, one.state or ()) if stats else one.state or ()
    seed = torch.tensor(SEED) if common is None else common[0]
    of_row, of_col, measured = encoder.encode(local, source, seed)
    measured = measured if settle is None else settle([measured])[0]
    row, col = encoder.storages(of_row, of_col)
    return seed, Result({"row": row, "col": col}, one.after([*measured]))


def gathered(
    one: PassCase,
    bind: BindEncoder,
    cut: Cut,
    local: Tensor,
    seed: Tensor,
    group: str,
    result: Result,
    *,
    at_once: bool,
) -> dict[Direction, Storage]:
    """The operands of the whole: rows as layers gather them, and columns from the encoded parts."""
    side, at_use = one.quantizer.side("col"), made_at_use(one.quantizer)
    operands: dict[Direction, Storage] = {}
    if cut.dim == 1 or (one.quantizer.col_source == "row" and (side.state or side.stochastic) and not at_use):
        for at, dim in one.operands(cut.dim):
            gather = OperandGather(operand_like(result.of(at)), dim, cut, group)
            operands[at] = gather.whole.storage(gather.finish(gather.begin(result.of(at).tensors())))
        return operands
    spec = one.encoder_spec(local)
    part = bind_part(bind, sent_part(spec), cut, group)
    encoder = gathering(part, bind, spec, cut, group, at_once=at_once).alone(group).encoder
    row, col, _ = encoder.encode(local, one.state or (), seed)
    if encoder.arrive is not None:
        row, col = encoder.arrive(row, col)
    if encoder.row is not None:
        operands["row"] = encoder.row.storage(row)
    if encoder.col is not None:
        later = there(encoder.later, "what makes the column operand")
        operands["col"] = encoder.col.storage(later(col if encoder.begin is None else encoder.begin(col)))
    return operands


def _part(operand: Storage, dim: int, cut: Cut) -> Storage | None:
    """The part of an operand that a rank has; None where that cuts what must stay whole."""
    pieces = []
    for place in (cut.place(i) for i in range(cut.chunks_per_rank)):
        piece = operand.narrow(dim, place, place + cut.size)
        if piece is None:
            return None
        pieces.append(piece)
    return cat(pieces, dim, agreed=True)
