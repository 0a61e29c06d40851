"""The CUDA sources that cast fragments of many masters, run on the host, make what the formats define, bit for bit.

A compiler for C++ stands in for the GPU: it shows that the arithmetic, the indices and the barriers are right, and not
that another GPU's instructions are. ``tests/gpu/test_casting.py`` runs them where they belong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from casting import SERVED, Case, as_bytes, buffers, case, cast, check, patterns, started
from emulated import real
from on_host import COMPILER, HostKernel
from quantizers import SIDES
from test_fragments import SPANS

import lpq
from lpq.core import Quantizer
from lpq.distributed.casting import batched
from lpq.distributed.casting.batched import Batched
from lpq.ops.fragments import TELL, TURN
from lpq.testing.conformance.test_kernels import compare_cast

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, which stands in for the GPU")
SHAPES = [(40, 130), (33, 7), (1, 5), (128, 64), (5, 1), (17, 256), (130, 260)]
"""Ragged and whole blocks, some of more than one tile, with rows of whole words and not."""


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In place of a GPU's kernels those of the host."""
    folder, found, patch = tmp_path_factory.mktemp("sources"), list[str](), pytest.MonkeyPatch()

    def host(kernel: Any) -> Any:
        return HostKernel(kernel, folder, found)

    def kernels(side: Quantizer, device: torch.device) -> Any:
        own = real(side)
        if own is None:
            return None
        return replace(own, measure=host(own.measure), scales=host(own.scales), codes=host(own.codes))

    patch.setattr(batched, "kernels_of", kernels)
    patch.setattr(batched, "TELL", host(TELL))
    patch.setattr(batched, "TURN", host(TURN))
    yield folder
    patch.undo()


@pytest.mark.parametrize("text", SERVED)
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_gets_the_cast_of_the_whole_master(text: str, seed: int) -> None:
    rng = random.Random(seed)
    ranks, (row, col) = rng.randint(1, 4), SIDES[seed]
    cases = [case(text, ranks, rng, shape=shape, row=row, col=col) for shape in SHAPES]
    pieces = started(cases, [one.weight() for one in cases], 0)
    assert all(isinstance(each, Batched) for each in pieces.casts)
    for rank, weights in enumerate(cast(cases)):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight, one.expected(i), (text, rank, one.spans))


@pytest.mark.parametrize("text", SERVED)
def test_every_kind_of_fragment(text: str) -> None:
    spans = max(SPANS.values(), key=len)
    cases = [Case(lpq.quantizer(text), torch.randn(shape), spans) for shape in ((40, 130), (130, 40), (52, 100))]
    for rank, weights in enumerate(cast(cases)):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight, one.expected(i), (text, rank))


@pytest.mark.parametrize("text", SERVED)
def test_every_bit_pattern_is_cast_alike(text: str) -> None:
    """NaNs of any payload, infinities and subnormal numbers, in fragments that cut blocks."""
    spans = [(0, 3333), (3333, 9000), (9000, 16384)]
    cases = [Case(lpq.quantizer(text), master, spans) for master in patterns(64, 256)]
    for rank, weights in enumerate(cast(cases)):
        for i, (weight, one) in enumerate(zip(weights, cases, strict=True)):
            check(weight, one.expected(i), (text, rank, i))


def test_a_byte_of_two_ranks_is_complete_on_both() -> None:
    """Before anything is gathered, each rank has every byte with an element of its own."""
    master = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    cuts = [0, 1, 2, 5, 5, 100, 131, 132, 133, 297]  # some of these fragments are half a byte
    one = Case(lpq.quantizer("nvfp4"), master, list(pairwise(cuts)), col=False)
    expected = as_bytes(one.expected(0)[0]).view(9, -1)
    for (start, stop), (weight,) in zip(one.spans, cast([one], finish=False), strict=True):
        data = as_bytes(buffers(weight)[0]).view(9, -1)
        for row, col in (divmod(position, 33) for position in range(start, stop)):
            assert data[row, col // 2] == expected[row, col // 2], (start, stop, row, col)


@pytest.mark.parametrize("text", SERVED)
def test_the_conformance_kit_tries_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer: Quantizer = lpq.quantizer(text)
    compare_cast(quantizer, torch.randn(33, 80).bfloat16())
    compare_cast(quantizer, torch.randn(1, 1).bfloat16())
    launch = HostKernel.launch

    def without_codes(self: HostKernel, *arguments: Any) -> None:
        if self.name != "codes":
            launch(self, *arguments)

    monkeypatch.setattr(HostKernel, "launch", without_codes)
    with pytest.raises(AssertionError, match="fragments of"):
        compare_cast(quantizer, torch.randn(33, 80).bfloat16())
