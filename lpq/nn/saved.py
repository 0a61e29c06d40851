"""The part that any layer has: a name in messages, and tensors that it saves, loads and moves.

Those tensors are an ordinary layer's, and beside them what its quantizers remember.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lpq.recipes.gemms import TENSORS
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered

if TYPE_CHECKING:
    from lpq.distributed.model_gathers import Gathering
    from lpq.distributed.tensor_parallel import Layouts
    from lpq.nn.accumulation import Accumulate


class Saved(nn.Module):
    """A module with a weight, which FSDP2 may gather quantized, and with memories."""

    weight: Tensor
    in_features: int
    out_features: int
    kind: ClassVar[str] = "lpq.nn.Linear"
    """The class in messages."""
    layouts: Layouts | None = None
    """How its input and output are shared out, as a style of ``lpq.distributed.tensor_parallel`` says."""
    place: str
    """Its name in the model that was converted, for error messages."""
    gathering: Gathering | None
    """With which other weights this one is gathered quantized, if it is."""
    accumulate: Accumulate | None
    """Where backward adds the gradient of the weight, in place: to ``weight.grad``, if it is there, or to
    ``weight.main_grad``, in the dtype that it has. None: it is handed to autograd, as it is always where
    ``torch.autograd.grad`` asks for it."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        kind = f"{self.kind}({self.in_features}, {self.out_features})"
        return f"layer {self.place}, {kind}" if self.place else kind

    def memories(self) -> dict[str, Tensor]:
        """All that its quantizers remember across steps, by the names of the buffers."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what it remembers")

    def static_values(self) -> dict[str, Tensor]:
        """Those of them that no step moves."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what is static")

    def forget_calls(self) -> None:
        """Check inputs and static values anew in the next pass."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.gathering is not None and not keep_vars and f"{prefix}weight" in destination:
            from lpq.distributed.shard import ordinary

            destination[f"{prefix}weight"] = ordinary(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        assigned = args[0].get("assign_to_params_buffers") and f"{prefix}weight" in state_dict
        if assigned and self.gathering is not None:
            from lpq.distributed.shard import in_place_of

            state_dict[f"{prefix}weight"] = in_place_of(self.weight, state_dict[f"{prefix}weight"])
        for name, memory in self.memories().items():
            if prefix + name in state_dict and state_dict[prefix + name].shape != memory.shape:
                del state_dict[prefix + name]  # another recipe's, which remembers more steps or fewer
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing: list[str] = args[2]
        unexpected: list[str] = args[3]
        for name, memory in self.memories().items():
            if prefix + name in missing:
                missing.remove(prefix + name)
                fresh = memory.is_meta and not self.weight.is_meta
                setattr(self, name, torch.zeros_like(memory, device=self.weight.device) if fresh else memory.zero_())
        self.forget_calls()
        self.claim_weight()  # with assign=True it is another one
        others = tuple(f"{prefix}{tensor}_" for tensor in TENSORS)
        unexpected[:] = [k for k in unexpected if not k.startswith(others) or "." in k[len(prefix) :]]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        state = self.memories()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in state.items():  # .to(torch.bfloat16) is meant for the weights
            device = getattr(self, name).device
            fresh = before.is_meta and device.type != "meta"
            setattr(self, name, torch.zeros_like(before, device=device) if fresh else before.to(device))
        self.claim_weight()  # torch has put another tensor's attributes in place of its own
        return self

    def claim_weight(self) -> None:
        """Have a weight that FSDP2 will gather quantized know whose it is, so that it knows when it is replaced."""
        weight = self._parameters.get("weight")
        if isinstance(weight, Gathered):
            weight.layer = weakref.ref(self)
        if isinstance(weight, QuantizedTensor):
            weight.owner = weakref.ref(self)
