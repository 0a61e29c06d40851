"""All weights at once by kernels of the table: the tables say the right thing, whatever the shapes and fragments.

The kernels are emulated here; ``tests/gpu/test_casting.py`` runs the real ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from casting import (
    EXAMPLE,
    FORMATS,
    SERVED,
    Case,
    as_bytes,
    buffers,
    case,
    cast,
    check,
    check_all,
    gather,
    register_example,
    started,
)
from emulated import emulated, send_words, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizers import SIDES
from test_fragments import SPANS, Launches

import lpq
from lpq import registry
from lpq.core import Quantizer
from lpq.distributed.casting import batched
from lpq.distributed.casting.batched import Batched, kernels_of, serves
from lpq.distributed.masters import cast_master_weights, finish_gather
from lpq.kernels.fragments import Fragment, fragment_table

some = settings(max_examples=settings().max_examples // 4, database=None, derandomize=True)
CPU = torch.device("cpu")
MEMORY = ("aten.empty.memory_format", "aten.new_empty.default")
"""Operators that launch nothing."""
BY_KERNELS = [*SERVED, "hybrid(row=nvfp4(rht=true), col=mxfp8)"]
"""Also a rotated format, on the side that is not rotated."""


@pytest.fixture(scope="module", autouse=True)
def launches() -> Iterator[list[str]]:
    """Every launch of a kernel, in place of which something runs here."""
    register_example()
    found: list[str] = []
    patch = pytest.MonkeyPatch()

    def kernels(side: Quantizer, device: torch.device) -> Any:
        return emulated(side, found)

    patch.setattr(batched, "kernels_of", kernels)
    patch.setattr(batched, "SEND", send_words(found))
    patch.setattr(batched, "TURN", turn(found))
    yield found
    patch.undo()
    sys.path.remove(str(EXAMPLE))
    registry.refresh()


@pytest.fixture(autouse=True)
def no_launches(launches: list[str]) -> None:
    launches.clear()


# ---------------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("text", BY_KERNELS)  # test_masters.py has the others
@some
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from(SIDES))
def test_every_rank_gets_the_cast_of_the_whole_master(
    text: str, rng: random.Random, ranks: int, sides: tuple[bool, bool]
) -> None:
    cases = [case(text, ranks, rng, row=sides[0], col=sides[1]) for _ in range(4)]
    check_all(cast(cases), cases, text)


@pytest.mark.parametrize("text", SERVED)
def test_every_kind_of_fragment(text: str) -> None:
    cases = [Case(lpq.quantizer(text), torch.randn(40, 130), spans) for spans in SPANS.values() if len(spans) == 9]
    cases += [Case(lpq.quantizer(text), torch.randn(130, 40), spans) for spans in SPANS.values() if len(spans) == 9]
    check_all(cast(cases), cases, text)


@pytest.mark.parametrize("text", SERVED)
def test_ranks_with_and_without_kernels_tell_each_other_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case(kind, 3, random.Random(i)) for i in range(3) for kind in (text, "identity", "nvfp4(rht=true)")]
    made = [started(cases, [one.weight() for one in cases], rank) for rank in range(3)]
    with monkeypatch.context() as without:
        without.setattr(batched, "kernels_of", kernels_of)
        made += [started(cases, [one.weight() for one in cases], rank) for rank in range(3)]
    assert isinstance(made[0].casts[0], Batched)
    assert not any(isinstance(each, Batched) for each in made[-1].casts)
    told = [pieces.tell() for pieces in made]
    for ours, theirs in zip(told[:3], told[3:], strict=True):
        assert torch.equal(ours, theirs)
    mixed = [made[0], made[4], made[2]]
    heard = torch.stack(told[:3]).amax(0)
    for pieces in mixed:
        pieces.encode(heard.clone())
    gather(cases, mixed)
    in_order = [sorted(_items(pieces), key=lambda item: item.index) for pieces in mixed]
    check_all([[item.weight for item in items] for items in in_order], cases, text)


def _items(pieces: Any) -> list[Any]:
    return [item for each in pieces.casts for item in each.items]


def test_operands_in_another_memory_layout_are_written() -> None:
    for text in ("mxfp8", "nvfp4(block=16x16)", "fp8(scaling=row)"):
        one = case(text, 2, random.Random(0), shape=(32, 64))
        strided = one.weight().map(lambda b: b.t().contiguous().t() if b.dim() == 2 else b)
        assert not buffers(strided)[0].is_contiguous()
        weights = [strided, one.weight()]
        made = [started([one], [weights[rank]], rank) for rank in range(2)]
        heard = torch.stack([pieces.tell() for pieces in made]).amax(0)
        for pieces in made:
            pieces.encode(heard)
        gather([one], made)
        check(strided, one.expected(0), text)


@pytest.mark.parametrize(
    "text",
    ["fp8(scaling=delayed, history=3)", "hybrid(row=fp8(scaling=delayed), col=mxfp8)"],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_delayed_scaling_remembers_as_the_cast_of_the_whole_does(text: str, ranks: int) -> None:
    rng, quantizer, shapes = random.Random(5), lpq.quantizer(text), [(40, 34), (7, 130), (40, 34)]
    states = [[quantizer.new_state() for _ in shapes] for _ in range(ranks)]
    whole = [quantizer.new_state() for _ in shapes]
    for _ in range(4):
        cases = [case(text, ranks, rng, shape=shape) for shape in shapes]
        expected = [one.expected(i, state) for i, (one, state) in enumerate(zip(cases, whole, strict=True))]
        for rank, weights in enumerate(cast(cases, states=states)):
            for weight, wanted in zip(weights, expected, strict=True):
                check(weight, wanted, (text, rank))
        for own in states:
            for state, wanted_state in zip(own, whole, strict=True):
                assert all(torch.equal(as_bytes(state[n]), as_bytes(t)) for n, t in wanted_state.items())


# ---------------------------------------------------------------------------------------------- how much is launched


def _launched(text: str, count: int, launches: list[str]) -> tuple[list[str], list[str]]:
    """The kernels for fragments, and the other operators."""
    shapes = [(64 + 3 * i, 64 + 5 * i) for i in range(count)]
    cases = [case(text, 3, random.Random(i), shape=shape, odd=(1.0,)) for i, shape in enumerate(shapes)]
    told = [started(cases, [one.weight() for one in cases], rank).tell() for rank in range(3)]
    pieces = started(cases, [one.weight() for one in cases], 1)
    heard = torch.stack(told).amax(0)
    launches.clear()
    with torch.no_grad(), Launches() as mode:
        pieces.tell()
        pieces.encode(heard)
        finish_gather(pieces)
    return list(launches), [name for name in mode.seen if name not in MEMORY]


@pytest.mark.parametrize("text", SERVED)
def test_the_number_of_launches_does_not_grow_with_the_number_of_shapes(text: str, launches: list[str]) -> None:
    _launched(text, 2, launches)  # what is looked up once
    (few, others), many = _launched(text, 2, launches), _launched(text, 9, launches)
    assert (few, others) == many
    assert set(few) >= {"measure", "scales", "codes", "turn"}
    assert len(few) <= 8
    assert len(others) < 20


def test_a_rank_alone_copies_nothing(launches: list[str]) -> None:
    one = case("nvfp4(block=16x16)", 1, random.Random(0), shape=(32, 48))
    weight = one.weight()
    pieces = cast_master_weights([weight], [one.part(0)], [0], None)
    assert len(pieces) == 0
    finish_gather(pieces)
    check(weight, one.expected(0), "alone")
    assert launches == ["measure", "scales", "codes", "turn"]


# ---------------------------------------------------------------------------------------------- the tables


def _fragment(**values: int) -> Fragment:
    known = {"rows": 300, "cols": 200, "start": 0, "stop": 60000, "codes_stop": 60000, "width": 200}
    return Fragment(**{**dict.fromkeys(Fragment._fields, 0), **known, **values})


@pytest.mark.parametrize(
    ("values", "block", "blocks"),
    [
        ({}, (None, None), (3 * 2, 1, 15)),
        ({}, (1, 128), (3 * 2, 10 * 1, 15)),
        ({}, (16, 1), (3 * 2, 1 * 7, 15)),
        ({"start": 25599, "stop": 25601, "codes_start": 25599, "codes_stop": 25601}, (None, None), (2 * 2, 1, 1)),
        ({"start": 4095, "stop": 8193, "codes_start": 4095, "codes_stop": 8193}, (None, None), (1 * 2, 1, 2)),
        ({"stop": 0, "codes_stop": 0}, (1, 32), (0, 10 * 1, 0)),
    ],
)
def test_blocks_of_threads_of_a_fragment(values: dict[str, int], block: Any, blocks: Sequence[int]) -> None:
    assert _fragment(**values).blocks(block) == tuple(blocks)


def test_a_table_that_says_the_same_is_not_made_again() -> None:
    rows = [_fragment(), _fragment(stop=0, codes_stop=0), _fragment(values=8)]
    table = fragment_table(rows, (1, 128), CPU)
    assert table.blocks == (12, 30, 30)
    assert table.rows[:, -3:].tolist() == [[0, 0, 0], [6, 10, 15], [6, 20, 15]]
    assert table.rows[2, 0] == 8
    assert fragment_table(rows, (1, 128), CPU).rows is table.rows
    assert fragment_table(rows[:2], (1, 128), CPU).rows is not table.rows


def test_what_is_served() -> None:
    def served(text: str) -> bool:
        one = case(text, 3, random.Random(0), shape=(64, 64))
        return serves(_items(started([one], [one.weight()], 0))[0].kind, CPU)

    assert all(map(served, BY_KERNELS))
    assert set(FORMATS) - set(BY_KERNELS) >= {"nvfp4(stochastic=true)", "nvfp4(rht=true)", "identity", "mxfp4"}
    for text in FORMATS:
        assert served(text) == (text in BY_KERNELS), text
    assert not served("hybrid(row=nvfp4, col=mxfp8, col_source=row)")
