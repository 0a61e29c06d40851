"""ConvertedModel: the things that the layers of one model have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lpq.distributed.alike import Comparison
from lpq.distributed.model_check import ModelCheck
from lpq.nn.fresh_states import FreshStates
from lpq.nn.siblings import SharedInputs
from lpq.nn.stages import Stages
from lpq.nn.wanted import Accumulate

if TYPE_CHECKING:
    from lpq.distributed.model_gathers import Gathering


@dataclass(eq=False)
class ConvertedModel:
    """The model of a layer. One call of ``lpq.convert`` gives its layers one; a layer that was made by hand begins with
    one of its own, which has nothing in it. A copy of layers is another model: it has the options of the conversion."""

    inputs: SharedInputs | None = None
    """The inputs that the layers encoded last: a tensor that several of them get is encoded once."""
    accumulate: Accumulate | None = None
    """The tensor to which backward adds the gradient of a weight in place: ``weight.grad``, if it is there, or
    ``weight.main_grad``, in its dtype. None: autograd gets the gradient, as it always does under
    ``torch.autograd.grad``."""
    stages: Stages | None = None
    """The present step, if recipes change by step."""
    check: ModelCheck | None = None
    """The check that ranks have the same model, where lpq gathers none of its weights."""
    fsdp: Gathering | None = None
    """The weights that FSDP2 gathers quantized, if ``lpq.convert(…, weights=…)`` prepared some."""
    fresh: FreshStates | None = None
    """The layers that have states which no step has moved, if their quantizers measure then."""

    def changes_together(self, device: torch.device, traced: bool) -> Comparison | None:
        """Return the comparison that ranks make if one was to change the recipe of a layer alone, where what travels
        depends on it and no pass would show it; None: ranks may change it one by one. ``device``: the device of the
        layer, and ``traced``: whether it was traced."""
        if self.fsdp is not None and self.fsdp.comparison.relied_on:
            return self.fsdp.comparison
        return None if self.check is None else self.check.changes_together(device, traced)

    def compare_again(self) -> None:
        """Have ranks compare the model once more, as a recipe has changed."""
        for compared in (self.fsdp, self.check):
            if compared is not None:
                compared.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stages": None, "check": None, "fresh": None}
