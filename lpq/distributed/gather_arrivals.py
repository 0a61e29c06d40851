"""Arrivals: the memory where the bytes of operands arrive that ranks send, and their way from there to their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.gathered_operand import GatheredOperand
from lpq.kernels.placing import SPEC, Place, RankPieces, bind_places
from lpq.kernels.table import serves
from lpq.operations.binding import on_device
from lpq.torch_private import fsdp
from lpq.torch_private.operators import copy_each

FLAT = 16 * 2**20
"""Bytes of a whole buffer, on average, up to which the buffers of a load travel in one tensor. A joint tensor needs one
more copy to put the buffers in their places. Handing small buffers to FSDP2 one by one takes the host longer than the
copy takes a GPU."""


class Arrivals:
    """Where the buffers of some operands arrive, and how all buffers are put in their places: in one launch, where a
    kernel can."""

    def __init__(
        self, wholes: Sequence[GatheredOperand], ranks: int, device: torch.device, sizes: Sequence[int] | None = None
    ) -> None:
        """``sizes``: the bytes that a rank sends of each buffer that travels, if something may follow its bytes."""
        self._device, large = device, [t for whole in wholes for t in whole.large]
        shares = [t.nbytes // ranks for t in large]
        self.flat = ranks > 1 and len(large) > 1 and sum(shares) * ranks <= FLAT * len(large)
        """Whether all travel in one tensor."""
        self.into: list[Tensor] = []
        """The flat tensors in which the buffers arrive."""
        self._arrive: list[Tensor] = []
        """The bytes that arrive of each buffer that is not in its place then: ``[ranks, n]``."""
        self._apart: list[Tensor] = []
        """The flat tensors whose memory is not the memory of the buffers."""
        self._belong: list[Tensor] = []
        """The buffers where they belong."""
        self._allocated: list[Tensor] = []
        """The buffers for which FSDP2 does not allocate memory."""
        self._stay = [whole.targets[number] for whole in wholes for number in whole.stays]
        if ranks == 1:
            self.into, self._allocated = [torch.empty(0, dtype=torch.uint8, device=device)], large
        elif self.flat:
            steps = shares if sizes is None else sizes
            self.into = self._apart = [torch.empty(sum(steps) * ranks, dtype=torch.uint8, device=device)]
            parts = [*torch.split(self._apart[0].view(ranks, -1), [*steps], 1)]
            self._arrive = [part[:, :share] for part, share in zip(parts, shares, strict=True)]
            self._belong = self._allocated = large
        else:
            for whole in wholes:
                flat = whole.arrivals()
                self.into += flat
                if not whole.in_place:
                    self._apart += flat
                    self._arrive += [t.view(ranks, -1) for t in flat]
                    self._belong += whole.large
            self._allocated = self._belong
        self._place: Place | None = None
        self._with: list[Tensor] = []
        """The buffers that did not travel and are put in place by the same launch."""
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []
        if self._arrive and serves(SPEC, device):
            self._bind(
                [whole.lines(t) for whole in wholes for t in whole.large if not (whole.in_place and not self.flat)]
            )
        else:
            arrive = iter(self._arrive)
            for whole in wholes if self._arrive else ():
                arrivals = [next(arrive) for _ in whole.large] if self.flat or not whole.in_place else []
                for to, part in whole.places(arrivals) if arrivals else ():
                    self._to.append(to)
                    self._from.append(part)
        fsdp.free(self._apart)

    def _bind(self, lines: Sequence[int]) -> None:
        """Choose the kernel; ``lines``: for each buffer that arrives, the number of its lines; each rank sends a piece
        of every line."""
        pieces = [
            RankPieces(high, len(part), part.shape[1] // high, part.stride(0))
            if part.numel()
            else RankPieces(0, len(part), 0, part.stride(0))
            for part, high in zip(self._arrive, lines, strict=True)
        ]
        if all(t.numel() == 1 for t in self._stay):  # or they may lie in memory in another order
            self._with = self._stay
            pieces += [RankPieces(1, 1, t.nbytes, t.nbytes) for t in self._stay]
        with on_device(self._device):
            self._place = bind_places(pieces, self._device)

    def place(self, staying: Sequence[Tensor]) -> None:
        """Put in place the buffers that have arrived, and the buffers that are equal on all ranks, which did not
        travel. The device is the current one."""
        fsdp.allocate(self._allocated)
        if self._place is not None:
            arrivals = [*self._arrive, *staying] if self._with else self._arrive
            self._place([t.data_ptr() for t in arrivals], [t.data_ptr() for t in (*self._belong, *self._with)])
        elif self._to:
            copy_each(self._to, self._from)
        if staying and not self._with:  # apart from the others: they are copied in one launch
            copy_each(self._stay, staying)
        fsdp.free(self._apart)
