"""The check of a model whose weights lpq does not gather: that ranks which share it out have the same recipes.

Nothing of lpq runs before such weights are gathered, so ranks compare before an optimizer writes to them.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import Watcher, steps

if TYPE_CHECKING:
    from lpq.torch_private.fsdp import Site


class Stages(Protocol):
    """The steps of a policy, as far as ranks compare them."""

    step: int

    @property
    def moving(self) -> bool:
        """Whether a later step may change a recipe."""


class Compared(Watcher):
    """Compares a model before the first step of its optimizer, before the first one after a recipe has changed, and,
    while recipes may change by step, before each: a rank cannot see that another one alone was given a step."""

    def __init__(self, model: nn.Module, stages: Stages | None) -> None:
        self.alike = False
        """Whether there is nothing to compare until a recipe changes."""
        self._model = weakref.ref(model)
        self._stages = stages
        self._apart: list[Site] = []
        """A weight of each set of ranks that compared last."""
        self._moving = False
        """Whether later steps might change a recipe then, on all ranks: so all compare before the next step."""
        steps().call(self)

    @classmethod
    def of(cls, model: nn.Module, stages: Stages | None) -> Compared | None:
        """The check of a model; None in a process that is alone, whose steps it would watch for nothing: to watch them
        imports the compiler."""
        alone = os.environ.get("WORLD_SIZE", "1") == "1" and not _has_ranks()
        return None if alone else cls(model, stages)

    def before_step(self, optimizer: Optimizer) -> None:
        model = self._model()
        if model is None or (self.alike and not self._moving) or not _has_ranks():
            return
        own = set(map(id, model.parameters()))
        if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            return
        from lpq.distributed.alike import are_equal, check_alike
        from lpq.torch_private import fsdp

        step = None if self._stages is None else self._stages.step
        if self._moving and are_equal(f"{self.alike}, step {step}", self._apart) and self.alike:
            return
        around = fsdp.outermost(model)
        names = {module: name for name, module in around.named_modules()}
        self._apart = check_alike(fsdp.sites(around, "weight"), names)
        self._moving = bool(self._apart) and self._stages is not None and self._stages.moving
        self.alike = True


def _has_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
