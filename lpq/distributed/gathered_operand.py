"""Whole: one operand of a whole weight, put together from the operands of its shards.

A shard holds some rows of the weight: those rows of the row operand, those columns of the column operand. A buffer
whose elements span the sharded dimension is the same on every rank and does not travel.

An ordinary matrix (``Quantizer.plain``) lies in memory as the weight does, and its column operand is a view of it, just
as where nothing is gathered: in another memory layout, products might sum in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats import Quantizer, Storage
from lpq.formats.format import Direction
from lpq.formats.layout import as_bytes
from lpq.formats.stacks import is_stack
from lpq.operations.transposing import transpose
from lpq.torch_private import fsdp


class Whole:
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
        self.ranks = ranks
        self._turned = side.plain and direction == "col"
        if direction == "col" and not self._turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        self.operand = side.storage.empty(side, shape, dtype, device)
        self._travels = [i for i, b in enumerate(side.layout) if stack or b.unit(dim) is not None]
        self._stays = [i for i, b in enumerate(side.layout) if not stack and b.unit(dim) is None]
        self.large = [self.operand.tensors()[i] for i in self._travels]
        """The buffers that travel."""
        in_place = direction == "row" or ranks == 1 or self._turned or stack  # whose shards are whole matrices
        self.arrived = [as_bytes(t) if in_place else as_bytes(torch.empty_like(t)) for t in self.large]
        """Where their bytes arrive, one rank's after the other's. For rows, that is their final place."""
        self._in_place = in_place
        if self._turned:
            self.operand = transpose(self.operand)
        fsdp.free((*self.large, *self.arrived))

    def departing(self, local: Storage) -> list[Tensor]:
        """The bytes that this rank sends of its operand."""
        tensors = (transpose(local) if self._turned else local).tensors()
        return [as_bytes(tensors[i]) for i in self._travels]

    def receive(self, local: Storage) -> None:
        """Complete the operand: with the bytes that arrived, and with this rank's buffers that are the same on all."""
        if self.ranks == 1:
            self.take(local)
            return
        if self._stays:
            targets, sources = self.operand.tensors(), local.tensors()
            for i in self._stays:
                if sources[i].is_cuda:  # it was encoded on the stream on which FSDP2 gathers
                    sources[i].record_stream(torch.cuda.current_stream(sources[i].device))
            fsdp.fill([targets[i] for i in self._stays], [sources[i] for i in self._stays])
        if not self._in_place:
            self._interleave()

    def _interleave(self) -> None:
        """Put the columns that arrived rank by rank in their places."""
        fsdp.allocate(self.large)
        for target, arrived in zip(self.large, self.arrived, strict=True):
            if target.numel() == 0:
                continue
            rows = target.shape[0]
            lines = target.view(rows, -1)
            unit = _unit(lines.shape[1] // self.ranks * target.element_size())
            by_rank = arrived.view(unit).view(self.ranks, rows, -1)
            fsdp.fill([lines.view(unit).view(rows, self.ranks, -1)], [by_rank.transpose(0, 1)])
        fsdp.free(self.arrived)

    def take(self, local: Storage) -> None:
        """Take over an operand that is whole already."""
        fsdp.allocate(self.large)
        fsdp.fill(self.operand.tensors(), local.tensors())


def _unit(count: int) -> torch.dtype:
    """The widest dtype of which so many bytes are a multiple. torch copies pieces of lines element by element: at the
    speed of memory if elements have 16 bytes, and at a fifth of it if they have 1."""
    units = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(unit for unit in units if count % unit.itemsize == 0)
