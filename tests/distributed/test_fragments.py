"""Masters that ranks share out in every way, for all formats and hybrids of them; how much is launched to cast them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from casting import EXAMPLE, FORMATS, Case, case, cast, check_all, register_example, started, values
from hybrids import SOME
from quantizers import KINDS
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from lpq import registry
from lpq.distributed.masters import finish_gather


@pytest.fixture(scope="module", autouse=True)
def third_party() -> Iterator[None]:
    register_example()
    yield
    sys.path.remove(str(EXAMPLE))
    registry.refresh()


ROWS, COLS = 40, 130
"""The shape of a weight all of whose blocks are ragged."""
SPANS = {
    "pieces of one element, odd starts, bytes and blocks that are cut, some without anything": [
        (17, 131), (0, 1), (1, 1), (2600, 5199), (1, 2), (2, 17), (131, 2600), (5200, 5200), (5199, 5200),
    ],
    "one rank has everything": [(5200, 5200), (0, 5200), (0, 0)],
}  # fmt: skip


@pytest.mark.parametrize("text", [*FORMATS, *SOME])
def test_every_kind_of_fragment(text: str) -> None:
    for i, (kind, spans) in enumerate(SPANS.items()):
        master = values((ROWS, COLS), random.Random(i))
        one = Case(lpq.quantizer(text), master, spans)
        check_all(cast([one]), [one], (text, kind))


def test_fragments_that_are_drawn_are_of_every_kind() -> None:
    """The tests with random fragments try them all."""
    odd = cut_blocks = empty = left_out = everything = 0
    for seed in range(25):
        rng = random.Random(seed)
        cases = [case("nvfp4", 4, rng) for _ in range(3)]
        for one in cases:
            for start, stop in one.spans:
                odd += start % 2 and start < stop
                cut_blocks += start % one.master.shape[1] % 16 and start < stop
                empty += start == stop
                everything += stop - start == one.master.numel()
        left_out += any(all(one.part(rank).numel() == 0 for one in cases) for rank in range(4))
    assert min(odd, cut_blocks, empty, left_out, everything) >= 5, (odd, cut_blocks, empty, left_out, everything)


class Launches(TorchDispatchMode):
    """The operators that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [] if func.is_view else [str(func)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", [*KINDS, "mxfp4"])
def test_the_number_of_launches_does_not_grow_with_the_number_of_weights(text: str) -> None:
    """Only with that of their shapes: those of one shape are cast together."""

    def launches(count: int, *shapes: tuple[int, int]) -> list[str]:
        a, b, c = (0, 1001), (1001, 2222), (2222, 4096)
        shared = [[a, b, c], [b, c, a]] * (count // 2)
        cases = [Case(lpq.quantizer(text), torch.randn(s), spans) for spans in shared for s in shapes]
        told = [started(cases, [one.weight() for one in cases], rank).tell() for rank in range(3)]
        heard, weights = torch.stack(told).amax(0), [one.weight() for one in cases]
        with torch.no_grad(), Launches() as mode:
            pieces = started(cases, weights, 1)
            pieces.tell()
            pieces.encode(heard)
            finish_gather(pieces)
        return mode.seen

    one, two = [(64, 64)], [(64, 64), (32, 128)]
    launches(2, *two)  # what is looked up once
    few_of_one, few_of_two = launches(2, *one), launches(2, *two)
    assert launches(8, *one) == few_of_one
    assert sorted(launches(6, *two)) == sorted(few_of_two)
    assert len(few_of_one) < len(few_of_two) < 2.1 * len(few_of_one)
