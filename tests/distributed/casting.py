"""Helpers of the tests of master weights: how masters are shared out, gathered and compared."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from example import EXAMPLE
from quantizers import QUANTIZERS
from support.comparing import as_bytes
from torch import Tensor

import lpq
from lpq import registry
from lpq.core import QuantizedTensor, Quantizer
from lpq.distributed import Pieces

SEED = 41
ODD = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-41, 1e9)
SHAPES = [(40, 130), (33, 7), (1, 5), (128, 64), (160, 48), (5, 1), (17, 256)]
FORMATS = [
    *QUANTIZERS, "hybrid(row=fp8(scaling=row), col=nvfp4)", "hybrid(row=fp8, col=mxfp8)",
    "hybrid(row=nvfp4(rht=true), col=mxfp8)", "nvfp4(stochastic=true)", "nvfp4(block=16x16, stochastic=true)", "int4",
]  # fmt: skip
Spans = Sequence[tuple[int, int]]
"""The part of one flattened weight that each rank owns."""


def register_example() -> None:
    """The example of a third party's plugin, as if it were installed."""
    sys.path.append(str(EXAMPLE))
    import lpq_int4

    registry.register(lpq_int4, name="int4")


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
        for buffer in buffers(weight):
            poison = torch.full((buffer.nbytes,), 0xA5, dtype=torch.uint8, device=buffer.device)
            buffer.copy_(poison.view(buffer.dtype).view(buffer.shape))
        return weight

    def part(self, rank: int) -> Tensor:
        start, stop = self.spans[rank]
        return self.master.flatten()[start:stop]

    def expected(self, i: int, state: Any = None) -> list[Tensor]:
        """The buffers of the cast of the whole master, as the weight ``i``."""
        whole = self.quantizer.quantize(self.master, row=self.row, col=self.col, seed=SEED + i, state=state)
        return [to.copy_(made) for to, made in zip(buffers(self.weight()), buffers(whole), strict=True)]


def buffers(weight: QuantizedTensor) -> list[Tensor]:
    return [buffer for _, operand in weight.operands for buffer in operand.tensors()]


def check(weight: QuantizedTensor, expected: Sequence[Tensor], what: object) -> None:
    """The weight has these bytes."""
    names = [f"{d}.{name}" for d, operand in weight.operands for name in operand.buffers()]
    for name, actual, wanted in zip(names, buffers(weight), expected, strict=True):
        assert torch.equal(as_bytes(actual), as_bytes(wanted)), (what, name, actual, wanted)


def owned(total: int, ranks: int, rng: random.Random) -> list[tuple[int, int]]:
    """Parts anywhere, some of them empty, of ranks in any order."""
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


def case(text: str, ranks: int, rng: random.Random, **options: Any) -> Case:
    """A weight of some shape, shared out somehow."""
    shape = options.pop("shape", None) or rng.choice(SHAPES)
    master = values(shape, rng, options.pop("odd", ODD))
    quantizer: Quantizer = lpq.quantizer(text)
    return Case(quantizer, master, owned(master.numel(), ranks, rng), **options)


def gather(pieces: Pieces, spans: Sequence[Spans], group: Any) -> None:
    """Have every rank send its part of each piece, as a caller does."""
    for piece in pieces:
        sent = as_bytes(piece.own).clone()
        for place, rank in enumerate(dist.get_process_group_ranks(group)):
            begin, end = piece.span(*spans[piece.weight][place])
            if begin < end:
                part = piece.buffer[begin:end]
                came = sent if rank == dist.get_rank() else torch.empty_like(part).view(torch.uint8)
                dist.broadcast(came, rank, group=group)
                part.copy_(came.view(part.dtype))
