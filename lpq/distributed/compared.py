"""The check of a model whose weights lpq does not gather: that ranks which share it out have the same recipes.

Nothing of lpq runs before such weights are gathered, so ranks compare before an optimizer writes to them.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import Watcher, steps


class Stages(Protocol):
    """The steps of a policy, as far as ranks compare them."""

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
        steps().call(self)

    @classmethod
    def of(cls, model: nn.Module, stages: Stages | None) -> Compared | None:
        """The check of a model; None in a process that is alone, whose steps it would watch for nothing: to watch them
        imports the compiler."""
        alone = os.environ.get("WORLD_SIZE", "1") == "1" and not _has_ranks()
        return None if alone else cls(model, stages)

    def before_step(self, optimizer: Optimizer) -> None:
        model = self._model()
        if model is None or (self.alike and (self._stages is None or not self._stages.moving)) or not _has_ranks():
            return
        from lpq.distributed.alike import check_alike
        from lpq.torch_private import fsdp

        around = fsdp.outermost(model)
        own = set(map(id, around.parameters()))
        if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            return
        check_alike(fsdp.sites(around, "weight"), {module: name for name, module in around.named_modules()})
        self.alike = True


def _has_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
