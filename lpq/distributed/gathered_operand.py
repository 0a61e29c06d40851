"""GatheredOperand: one operand of a whole weight, put together from the operands of its shards.

A shard holds some rows of the weight: the same rows of the row operand, and the same columns of the column operand. A
buffer whose elements span the sharded dimension is the same on every rank and does not travel.

An ordinary matrix (``Quantizer.plain``) lies in memory as the weight does, and its column operand is a view of it, just
as where nothing is gathered: in another memory layout, products might sum in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import as_bytes, row_major
from lpq.formats.sections import is_stack
from lpq.operations.transposing import transpose
from lpq.torch_private import fsdp

Place = tuple[Tensor, Tensor]
"""Where elements of a buffer belong, and the same elements where they arrived."""


class GatheredOperand:
    """An operand in memory that is filled, freed and filled again, while its tensors stay the same."""

    def __init__(
        self,
        direction: Direction,
        side: Quantizer,
        shape: tuple[int, ...],
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        dim, stack = 0 if direction == "row" else 1, is_stack(shape)
        self.transposed = side.plain and direction == "col"
        """Whether it lies in memory as the row operand."""
        if direction == "col" and not self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        self.operand = side.storage.empty(side, shape, dtype, device)
        tensors = self.operand.tensors()
        large = [i for i, b in enumerate(side.layout) if stack or b.unit(dim) is not None]
        self.large = [tensors[i] for i in large]
        """The buffers that have memory only while the weight is gathered."""
        self.travels = large if ranks > 1 else []
        """The buffers that ranks send, by their numbers."""
        self.stays = [i for i in range(len(tensors)) if i not in self.travels]
        """The buffers that are the same on all ranks, by their numbers."""
        self.in_place = direction == "row" or self.transposed or stack  # whose shards are whole matrices
        """Whether the parts of all ranks, one behind the other, are the buffers."""
        if self.transposed:
            self.operand = transpose(self.operand)
        # Autograd must not count the filling as a change: the values are the values that the tensors had when
        # they were saved.
        self.targets = [t.data for t in self.operand.tensors()]
        """All buffers, to be filled."""
        fsdp.free(self.large)

    def lines(self, buffer: Tensor) -> int:
        """The number of lines of a buffer that travels; each rank has a part of every line."""
        return 1 if self.in_place else buffer.shape[0]

    def arrivals(self) -> list[Tensor]:
        """For each buffer that travels, flat memory where the parts of all ranks may arrive, one behind the other. It
        is the memory of the buffer itself if it is ``in_place``."""
        return [as_bytes(t) if self.in_place else as_bytes(torch.empty_like(t)) for t in self.large]

    def places(self, arrived: Sequence[Tensor]) -> Iterator[Place]:
        """The places of what arrives, for each buffer that travels: as bytes ``[ranks, n]``."""
        for whole, parts in zip(self.large, arrived, strict=True):
            if whole.numel():
                yield _by_rank(as_bytes(whole.data), self.lines(whole), parts)


def sent_bytes(buffers: Iterable[tuple[GatheredOperand, Tensor]]) -> list[Tensor]:
    """The bytes that this rank sends of the buffers of its part of an operand."""
    pieces = []
    for whole, buffer in buffers:
        if whole.transposed:
            buffer = buffer.mT
        if not buffer.is_contiguous() or buffer.numel() == 1:  # strides of one element may be unusual
            buffer = row_major(buffer)
        pieces.append(buffer.view(-1).view(torch.uint8))
    return pieces


def _by_rank(whole: Tensor, rows: int, parts: Tensor) -> Place:
    """View as elements a buffer that has ``rows`` lines in the parts of all ranks, and in the same way ``parts``, its
    bytes as they arrived."""
    ranks, count = parts.shape
    unit = _unit(gcd(count // rows, parts.stride(0), parts.storage_offset()))
    by_rank = parts.view(unit).view(ranks, rows, -1).transpose(0, 1)
    return whole.view(unit).view(rows, ranks, -1), by_rank


def _unit(count: int) -> torch.dtype:
    """The widest dtype whose size divides ``count`` bytes. torch copies pieces of lines element by element: at the
    speed of memory if elements have 16 bytes, and at a fifth of it if they have 1."""
    units = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(unit for unit in units if count % unit.itemsize == 0)
