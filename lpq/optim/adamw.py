"""AdamW's step of parameters whose moments are stored in a format: what it computes, and the launches that do it.

Everything is computed in fp32, and each operation is rounded by itself, so that a kernel equals it bit for bit on any
device. A kernel reads and writes the moments tile by tile; the reference decodes all moments of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import attrgetter, or_
from typing import Any, Literal, NamedTuple

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


@dataclass(slots=True)
class StepLaunch:
    """Parameters of a kind that one launch steps, all with the same numbers."""

    numbers: Numbers
    tiles: Tiles
    aligned: bool
    """Whether all addresses, and the columns, are multiples of ``ALIGNMENT``."""
    tensors: tuple[Tensor, ...]
    """The first parameter, its gradient, and codes and scales of both moments."""
    works: list[Work] = field(default_factory=list)
    entries: list[tuple[int, ...]] = field(default_factory=list)
    """The addresses of each parameter, its gradient and its buffers, and its rows and columns."""
    size: int = 0
    """The elements of all parameters."""


Outcome = Literal["stepped", "again", "no kernel"]
"""``again``: a parameter that was given before, whose next step comes when this one is done."""


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
        self._first, self._second = attrgetter(*first.names), attrgetter(*second.names)
        self._stepped = stepped
        self._waiting: dict[Hashable, StepLaunch] = {}
        self._places: set[int] = set()
        """The addresses of all parameters so far."""

    def add(self, work: Work, numbers: Numbers) -> Outcome:
        """Step a parameter, at once or together with others, if a kernel can."""
        p, gradient = work.p, work.gradient
        if (tiles := self._tiles(p.device)) is None:
            return "no kernel"
        # no function's call for each tensor: a small parameter takes the host longer than the GPU
        m_codes, m_scales = self._first(work.m.stored[0])
        root_codes, root_scales = self._second(work.root.stored[0])
        written = p, m_codes, m_scales, root_codes, root_scales
        if not all(map(Tensor.is_contiguous, written)):
            return "no kernel"
        size, cols = p.numel(), p.shape[-1]
        if size == 0:
            self._stepped([work])
            return "stepped"
        if alone := not gradient.is_contiguous():
            gradient = gradient.contiguous()
        tensors = p, gradient, m_codes, m_scales, root_codes, root_scales
        addresses = [*map(Tensor.data_ptr, tensors)]
        if addresses[0] in self._places:
            return "again"
        self._places.add(addresses[0])
        aligned = reduce(or_, addresses, cols) % ALIGNMENT == 0
        kind = numbers, p.device, p.dtype, gradient.dtype, aligned, alone
        launch = self._waiting.get(kind)
        if launch is None:
            launch = self._waiting[kind] = StepLaunch(numbers, tiles, aligned, tensors)
        launch.works.append(work)
        launch.entries.append((*addresses, size // cols, cols))
        launch.size += size
        if alone or launch.size >= TOGETHER:  # a copy of a gradient does not wait: only one is there at a time
            self._step(self._waiting.pop(kind))
        return "stepped"

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
    launch_step(launch.tensors, launch.entries, launch.aligned, numbers, maximize, *launch.tiles)
