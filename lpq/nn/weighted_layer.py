"""The common part of all layers: a name in messages, and a weight that is saved, loaded and moved."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from lpq.distributed.ranks import Ranks
from lpq.distributed.shard import in_place_of, ordinary
from lpq.nn.called import Weight
from lpq.nn.stateful_layer import StatefulLayer
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered

if TYPE_CHECKING:
    from lpq.distributed.tensor_parallel import Layouts
    from lpq.distributed.weight_gather import Gather


class WeightedLayer(StatefulLayer):
    """A module with a weight, which FSDP2 may gather quantized, and with memories."""

    if TYPE_CHECKING:
        weight: Tensor
    else:
        weight = Weight()
    in_features: int
    out_features: int
    kind: ClassVar[str] = "lpq.nn.Linear"
    layouts: Layouts | None = None
    """How its input and output are divided over ranks, as a style of ``lpq.distributed.tensor_parallel`` sets it."""
    gather: Gather | None = None
    """How FSDP2 gathers its weight quantized, if ``lpq.convert(…, weights=…)`` prepared it. Compiled layers read it
    here, and so share code."""

    @property
    def sized(self) -> str:
        return f"{self.kind}({self.in_features}, {self.out_features})"

    def shared_weight(self) -> Tensor:
        return super().shared_weight() if self.gather is None or self.gather.unit is None else self.gather.site.param

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.gather is not None and not keep_vars and f"{prefix}weight" in destination:
            destination[f"{prefix}weight"] = ordinary(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.gather is not None and args[0].get("assign_to_params_buffers") and f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = in_place_of(self.weight, state_dict[f"{prefix}weight"])
        errors, known = args[-1], len(args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.gather is not None:
            why = f"{self.title}: delete losses and outputs of earlier passes, whose graph of autograd holds it: "
            errors[known:] = [why + e if "weakref" in e or "use_count" in e else e for e in errors[known:]]
        self.claim_weight()  # with assign=True it is another one

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        weight = self._parameters.get("weight")
        had_values = isinstance(weight, QuantizedTensor) and not weight.is_meta
        try:
            super()._apply(fn, recurse)
        except RuntimeError as error:
            if not isinstance(weight, Gathered) or "Couldn't swap" not in str(error):
                raise
            raise RuntimeError(
                f"{self.title}: its weight, which lpq.convert(…, weights=…) prepared, cannot be moved or cast, since "
                "other code refers to it, such as a graph of autograd, or an engine that shards weights by itself: "
                "move the model before that, or convert it with weights=None. The modules before it were moved or cast "
                f"({error.__cause__ or error})"
            ) from error
        if had_values and self.weight.is_meta and Ranks().size > 1:  # else the others would wait for the first one
            raise RuntimeError(
                f"{self.title}: its weight is stored quantized, and loses its values on the meta device. Libraries "
                "that move a model there have rank 0 send the values, which it cannot for such a weight: turn that "
                "off (cpu_ram_efficient_loading=False in accelerate), or convert with weights='high_precision'"
            )
        self.claim_weight()
        return self

    def claim_weight(self) -> None:
        """Give a weight that FSDP2 will gather quantized a reference to its layer, to find out when it is replaced."""
        weight = self._parameters.get("weight")
        if isinstance(weight, Gathered):
            weight.layer = weakref.ref(self)
        if isinstance(weight, QuantizedTensor):
            weight.owner = weakref.ref(self)
