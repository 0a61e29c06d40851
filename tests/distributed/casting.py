"""Helpers of the tests of master weights: how masters are shared out, cast, gathered and compared."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from example import EXAMPLE
from quantizers import QUANTIZERS
from torch import Tensor

import lpq
from lpq import registry
from lpq.core import QuantizedTensor, Quantizer
from lpq.distributed.casting import agreement
from lpq.distributed.casting.given import items_of
from lpq.distributed.masters import Pieces, finish_gather

SEED = 41
ODD = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-41, 1e9)
SHAPES = [(40, 130), (33, 7), (1, 5), (128, 64), (160, 48), (5, 1), (17, 256)]
FORMATS = [
    *QUANTIZERS,
    "hybrid(row=fp8(scaling=row), col=nvfp4)",
    "hybrid(row=nvfp4(rht=true), col=mxfp8)",
    "nvfp4(stochastic=true)",
    "nvfp4(block=16x16, stochastic=true)",
    "mxfp4",
    "hybrid(row=mxfp4, col=nvfp4)",
]
SERVED = [
    "fp8",
    "fp8(dtype=e5m2, pow2=true)",
    "fp8(scaling=delayed, history=4)",
    "fp8(scaling=row)",
    "fp8(scaling=block)",
    "fp8(scaling=block, block=128x128)",
    "mxfp8",
    "mxfp8(dtype=e5m2)",
    "nvfp4",
    "nvfp4(block=16x16)",
    "hybrid(row=fp8, col=fp8(dtype=e5m2))",
    "hybrid(row=fp8(scaling=row), col=nvfp4)",
    "hybrid(row=mxfp8, col=nvfp4(block=16x16))",
]
"""Those whose weights kernels cast all at once, whatever their shapes."""
Spans = Sequence[tuple[int, int]]
"""The part of one flattened weight that each rank owns."""


def register_example() -> None:
    """The example of a third party's plugin, as if it were installed."""
    sys.path.append(str(EXAMPLE))
    import lpq_mxfp4

    registry.register(lpq_mxfp4, name="mxfp4")


@dataclass(frozen=True)
class Case:
    """One weight: its master, what becomes of it, and which rank owns what."""

    quantizer: Quantizer
    master: Tensor
    spans: Spans
    row: bool = True
    col: bool = True
    dtype: torch.dtype = torch.bfloat16

    def weight(self) -> QuantizedTensor:
        """A weight to be cast into, every byte of which is wrong."""
        zeros = torch.zeros(self.master.shape, dtype=self.dtype, device=self.master.device)
        seed = torch.zeros((), dtype=torch.int64, device=zeros.device)
        weight = self.quantizer.quantize(zeros, row=self.row, col=self.col, seed=seed)
        for _, operand in weight.operands:
            for buffer in operand.tensors():
                poison = torch.full((buffer.nbytes,), 0xA5, dtype=torch.uint8, device=buffer.device)
                buffer.copy_(poison.view(buffer.dtype).view(buffer.shape))
        return weight

    def part(self, rank: int) -> Tensor:
        start, stop = self.spans[rank]
        return self.master.flatten()[start:stop]

    def expected(self, i: int, state: Any = None) -> list[Tensor]:
        """The buffers of the cast of the whole master, as the weight ``i``."""
        whole = self.quantizer.quantize(self.master, row=self.row, col=self.col, seed=SEED + i, state=state)
        kept = zip(buffers(self.weight()), buffers(whole), strict=True)
        return [to.copy_(made) for to, made in kept]


def buffers(weight: QuantizedTensor) -> list[Tensor]:
    return [buffer for _, operand in weight.operands for buffer in operand.tensors()]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(weight: QuantizedTensor, expected: Sequence[Tensor], what: object) -> None:
    """The weight has these bytes."""
    names = [f"{d}.{name}" for d, operand in weight.operands for name in operand.buffers()]
    for name, actual, wanted in zip(names, buffers(weight), expected, strict=True):
        assert torch.equal(as_bytes(actual), as_bytes(wanted)), (what, name, actual, wanted)


def check_all(ranks: Sequence[Sequence[QuantizedTensor]], cases: Sequence[Case], what: object) -> None:
    """Each rank's weights are the casts of the whole masters, which are cast once for all ranks."""
    expected = [one.expected(i) for i, one in enumerate(cases)]
    for rank, weights in enumerate(ranks):
        for weight, one, wanted in zip(weights, cases, expected, strict=True):
            check(weight, wanted, (what, rank, one.quantizer, one.spans))


def owned(total: int, ranks: int, rng: random.Random) -> list[tuple[int, int]]:
    """Fragments anywhere, some of them empty, of ranks in any order."""
    cuts = sorted(rng.choice((0, total, rng.randint(0, total), rng.randint(0, total))) for _ in range(ranks - 1))
    spans = list(zip([0, *cuts], [*cuts, total], strict=True))
    rng.shuffle(spans)
    return spans


def values(shape: tuple[int, int], rng: random.Random, odd: Sequence[float] = ODD) -> Tensor:
    """A master; at times with odd values somewhere."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    x *= 10 ** rng.uniform(-3, 3)
    for _ in range(rng.randrange(3)):
        x.view(-1)[rng.randrange(x.numel())] = rng.choice(odd)
    return x


def patterns(rows: int, cols: int) -> list[Tensor]:
    """Masters of random bits: of any kind; without large numbers and NaNs; and of all magnitudes, each in a square."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (3, rows, cols), generator=generator).int()
    bits[1] = torch.where(bits[1] >> 23 & 255 > 200, bits[1] & -(1 << 30) - 1, bits[1])
    down, across = torch.arange(rows)[:, None] // 32, torch.arange(cols) // 32
    kept = (2 * (down * (cols // 32) + across) % 31).int()
    bits[2] &= -(1 << 31) | (2 << kept) - 1
    return list(bits.view(torch.float32))


def case(text: str, ranks: int, rng: random.Random, **options: Any) -> Case:
    """A weight of some shape, shared out somehow."""
    shape = options.pop("shape", None) or rng.choice(SHAPES)
    master = values(shape, rng, options.pop("odd", ODD))
    quantizer: Quantizer = lpq.quantizer(text)
    return Case(quantizer, master, owned(master.numel(), ranks, rng), **options)


# ---------------------------------------------------------------------------------------------- without processes


def cast(
    cases: Sequence[Case],
    *,
    reduce: bool = True,
    states: Sequence[Sequence[Mapping[str, Tensor]]] | None = None,
    finish: bool = True,
) -> list[list[QuantizedTensor]]:
    """The weights of each rank. Its ranks are simulated: each does what ``cast_master_weights`` does with what all
    of them told."""
    ranks = len(cases[0].spans)
    weights = [[case.weight() for case in cases] for _ in range(ranks)]
    with torch.no_grad():
        made = [started(cases, weights[rank], rank, states[rank] if states else None) for rank in range(ranks)]
        told = [pieces.tell() for pieces in made]
        heard = torch.stack(told).amax(0)
        first = agreed(ranks) + shares(ranks) * len(cases)
        for pieces, own in zip(made, told, strict=True):
            pieces.encode(heard.clone() if reduce else torch.cat([heard[:first], own[first:]]))
    if finish:
        gather(cases, made)
    return weights


def agreed(ranks: int) -> int:
    """The words that say which cast it is."""
    return ranks + 2 * (agreement.DIGEST + agreement.SEED)


def shares(ranks: int) -> int:
    """The words that say which elements of a weight each rank owns."""
    return 4 * (ranks + 1)


def started(cases: Sequence[Case], weights: Sequence[QuantizedTensor], rank: int, states: Any = None) -> Pieces:
    parts, offsets = [case.part(rank) for case in cases], [case.spans[rank][0] for case in cases]
    ranks = len(cases[0].spans)
    return Pieces(items_of(weights, parts, offsets, states, SEED, ranks), rank, ranks)


def gather(cases: Sequence[Case], made: Sequence[Pieces]) -> None:
    """Act as a caller: every rank gets the pieces of all, and finishes."""
    for same in zip(*made, strict=True):
        assert len({(piece.weight, piece.name) for piece in same}) == 1
        sent = [piece.own.clone() for piece in same]
        for piece in same:
            got = 0
            for rank, (start, stop) in enumerate(cases[piece.weight].spans):
                begin, end = piece.span(start, stop)
                piece.buffer[begin:end] = sent[rank]
                got += end - begin
            assert got == len(piece.buffer)
    for pieces in made:
        finish_gather(pieces)
