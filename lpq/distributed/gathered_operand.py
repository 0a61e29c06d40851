"""Whole: one operand of a whole weight, put together from the operands of its shards.

A shard holds some rows of the weight: those rows of the row operand, those columns of the column operand. A buffer
whose elements span the sharded dimension is the same on every rank and does not travel.

An ordinary matrix (``Quantizer.plain``) lies in memory as the weight does, and its column operand is a view of it, just
as where nothing is gathered: in another memory layout, products might sum in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import as_bytes
from lpq.formats.stacks import is_stack, transposed
from lpq.operations.derived_operands import derive_col_into
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
        stays = [i for i, b in enumerate(side.layout) if not stack and b.unit(dim) is None]
        tensors = self.operand.tensors()
        self.large = [tensors[i] for i in self._travels]
        """The buffers that travel."""
        in_place = direction == "row" or ranks == 1 or self._turned or stack  # whose shards are whole matrices
        self.arrived = [as_bytes(t) if in_place else as_bytes(torch.empty_like(t)) for t in self.large]
        """Where their bytes arrive, one rank's after the other's. For rows, that is their final place."""
        self._scattered = (
            [] if in_place else [_by_rank(*both, ranks) for both in zip(self.large, self.arrived, strict=True)]
        )
        """For columns that arrived, their places, and what arrived in the order of those."""
        if self._turned:
            self.operand = transpose(self.operand)
        # Autograd must not take what is filled in for a change: the values are those when the tensors were saved.
        self._targets = [t.data for t in self.operand.tensors()]
        self._stays = [(i, self._targets[i]) for i in stays]
        fsdp.free((*self.large, *self.arrived))

    def departing(self, local: Sequence[Tensor]) -> list[Tensor]:
        """The bytes that this rank sends of the buffers of its operand."""
        return [as_bytes(transposed(local[i]) if self._turned else local[i]) for i in self._travels]

    def receive(self, local: Sequence[Tensor]) -> None:
        """Complete the operand: with the bytes that arrived, and with this rank's buffers that are the same on all."""
        if self.ranks == 1:
            self.take(local)
            return
        for i, target in self._stays:
            source = local[i]
            if source.is_cuda:  # it was encoded on the stream on which FSDP2 gathers
                source.record_stream(torch.cuda.current_stream(source.device))
            target.copy_(source)
        if self._scattered:
            fsdp.allocate(self.large)
            for target, arrived in self._scattered:
                target.copy_(arrived)
            fsdp.free(self.arrived)

    def take(self, local: Sequence[Tensor]) -> None:
        """Take over the buffers of an operand that is whole already."""
        fsdp.allocate(self.large)
        for target, source in zip(self._targets, local, strict=True):
            target.copy_(source)

    def derive(self, quantizer: Quantizer, row: Whole) -> None:
        """Make this column operand of the row operand that it follows from."""
        fsdp.allocate(self.large)
        derive_col_into(quantizer, row.operand, self._targets)


def _by_rank(whole: Tensor, arrived: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The same elements of a buffer where columns are in their places, and where they arrived rank by rank."""
    if whole.numel() == 0:
        return whole.data, whole.data
    rows = whole.shape[0]
    lines = whole.data.view(rows, -1)
    unit = _unit(lines.shape[1] // ranks * whole.element_size())
    by_rank = arrived.view(unit).view(ranks, rows, -1)
    return lines.view(unit).view(rows, ranks, -1), by_rank.transpose(0, 1)


def _unit(count: int) -> torch.dtype:
    """The widest dtype of which so many bytes are a multiple. torch copies pieces of lines element by element: at the
    speed of memory if elements have 16 bytes, and at a fifth of it if they have 1."""
    units = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(unit for unit in units if count % unit.itemsize == 0)
