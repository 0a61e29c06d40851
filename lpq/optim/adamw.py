"""AdamW's step of parameters whose moments are stored in a format: what it computes, and the launches that do it.

Everything is computed in fp32, and each operation is rounded by itself, so that a kernel equals it bit for bit on any
device. A kernel reads and writes the moments tile by tile; the reference decodes all moments of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lpq.formats import Quantizer
from lpq.operations.stored_tile import ALIGNMENT, StoredTile, stored_tile
from lpq.optim.rounding import LeastKept, root_of
from lpq.tensor import QuantizedTensor

FIRST, SECOND = "exp_avg", "exp_avg_sq"
TOGETHER = 1 << 25
"""The elements with which a launch does not wait for more parameters: a GPU takes longer for them than the host for
the next ones."""


class Numbers(NamedTuple):
    """The numbers of a step."""

    keep: float
    """The factor of weight decay."""
    toward: float
    """The share of the gradient in the first moment."""
    second: float
    fresh: float
    """The shares of the last second moment, and of the gradient's square, in the second moment."""
    correct: float
    """The factor that corrects the root of the second moment."""
    eps: float
    rate: float
    """The rate, with the correction of the first moment."""
    maximize: bool

    @staticmethod
    def of(group: Mapping[str, Any], step: float) -> Numbers:
        """The numbers of a group in this step, which counts from 1."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate = float(group["lr"])
        return Numbers(
            1 - rate * float(group["weight_decay"]), 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5,
            float(group["eps"]), rate / (1 - beta1**step), bool(group["maximize"]),
        )  # fmt: skip


def is_plain(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps a group as this file does."""
    if type(optimizer) is not AdamW or any(group[name] for name in ("amsgrad", "capturable", "differentiable")):
        return False
    return bool(group.get("decoupled_weight_decay", True))


def step_reference(p: Tensor, gradient: Tensor, m: Tensor, root: Tensor, n: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter, the first moment and the root of the second moment after a step, in fp32."""
    g = -gradient.float() if n.maximize else gradient.float()
    m = m + (g - m) * n.toward
    root = root_of(root * root * n.second + g * g * n.fresh)
    return p.float() * n.keep - m / (root * n.correct + n.eps) * n.rate, m, root


class Tiles(NamedTuple):
    """The functions of both moments in a program."""

    first: StoredTile
    second: StoredTile
    share: float
    """The least share of the largest root in a block that its format keeps; 0 if it keeps all."""


def tiles(first: Quantizer, second: Quantizer, least: LeastKept | None, device: torch.device) -> Tiles | None:
    """The functions with which a kernel steps moments in these formats on this device; None: there is no kernel."""
    both = stored_tile(first, device), stored_tile(second, device)
    if both[0] is None or both[1] is None:
        return None
    if least is not None and least.stat.block != (1, both[1].width):
        return None
    return Tiles(both[0], both[1], 0.0 if least is None else least.share)


class Work(NamedTuple):
    """A parameter, and what its step reads and writes beside it."""

    parameter: Tensor
    """As the optimizer has it."""
    steps: Tensor
    """How often it was stepped."""
    p: Tensor
    """The part that lies here."""
    gradient: Tensor
    m: QuantizedTensor
    root: QuantizedTensor
    buffers: list[Tensor]
    """Codes and scales of both moments."""

    def is_contiguous(self) -> bool:
        """Whether a kernel can write what is written."""
        return all(map(Tensor.is_contiguous, (self.p, *self.buffers)))


@dataclass(slots=True)
class StepLaunch:
    """Parameters of a kind that one launch steps, all with the same numbers."""

    numbers: Numbers
    tiles: Tiles
    aligned: bool
    """Whether all addresses, and the columns, are multiples of ``ALIGNMENT``."""
    works: list[Work] = field(default_factory=list)
    entries: list[tuple[int, ...]] = field(default_factory=list)
    """The addresses of each parameter, its gradient and its buffers, and its rows and columns."""
    size: int = 0
    """The elements of all parameters."""


class StepLaunches:
    """The launches that step parameters, whose gradients are copied where a kernel cannot read them as they lie.

    Args:
        first: The format of the first moment.
        second: The format of the root of the second moment.
        least: The least roots that the second format keeps.
        stepped: It is called with the parameters of each launch, once they are stepped.
    """

    def __init__(
        self, first: Quantizer, second: Quantizer, least: LeastKept | None, stepped: Callable[[list[Work]], None]
    ) -> None:
        self._tiles = cache(partial(tiles, first, second, least))
        self._stepped = stepped
        self._waiting: dict[Hashable, StepLaunch] = {}
        self._places: set[int] = set()
        """The addresses of all parameters so far."""

    def tiles_for(self, work: Work) -> Tiles | None:
        """The functions with which a kernel steps a parameter; None if there is no kernel that can."""
        return self._tiles(work.p.device) if work.is_contiguous() else None

    def add(self, work: Work, numbers: Numbers, tiles: Tiles) -> bool:
        """Step a parameter, at once or together with others; False if it was given before: its next step comes when
        this one is done."""
        p, size, cols = work.p, work.p.numel(), work.p.shape[-1]
        if size == 0:
            self._stepped([work])
            return True
        if (place := p.data_ptr()) in self._places:
            return False
        self._places.add(place)
        if alone := not work.gradient.is_contiguous():
            work = work._replace(gradient=work.gradient.contiguous())
        addresses = [tensor.data_ptr() for tensor in (p, work.gradient, *work.buffers)]
        aligned = reduce(or_, addresses, cols) % ALIGNMENT == 0
        kind = numbers, p.device, p.dtype, work.gradient.dtype, aligned, alone
        launch = self._waiting.get(kind)
        if launch is None:
            launch = self._waiting[kind] = StepLaunch(numbers, tiles, aligned)
        launch.works.append(work)
        launch.entries.append((*addresses, size // cols, cols))
        launch.size += size
        if alone or launch.size >= TOGETHER:  # a copy of a gradient does not wait: only one is there at a time
            self._step(self._waiting.pop(kind))
        return True

    def step(self) -> None:
        """Step all parameters that wait."""
        while self._waiting:
            self._step(self._waiting.pop(next(iter(self._waiting))))

    def _step(self, launch: StepLaunch) -> None:
        step_kernel(launch)
        self._stepped(launch.works)


def step_kernel(launch: StepLaunch) -> None:
    """Step the parameters of a launch, and encode their moments."""
    from lpq.optim.adamw_triton import launch_step

    *numbers, maximize = launch.numbers
    first = launch.works[0]
    tensors = first.p, first.gradient, *first.buffers
    launch_step(tensors, launch.entries, launch.aligned, numbers, maximize, *launch.tiles)
