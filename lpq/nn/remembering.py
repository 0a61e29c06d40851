"""Modules whose quantizers remember something, in buffers that are saved, loaded and moved beside the weights.

They also note that they ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lpq.nn.quantizer_state import Memory
from lpq.recipes.gemms import TENSORS
from lpq.torch_private.compiling import is_exporting, once_when_traced

if TYPE_CHECKING:
    from lpq.distributed.compared import Compared
    from lpq.tensor.observed import Observer


class Remembering(nn.Module):
    """A module with such buffers. They are fp32 whatever the weights are cast to."""

    observers: tuple[Observer, ...] = ()
    """Those that each pass tells of its tensors, inside of ``observing`` (``lpq/nn/observing.py``)."""
    owners: ClassVar[tuple[str, ...]] = TENSORS
    """The beginnings of the names of all buffers that recipes add to this module."""

    traced: bool = False
    """Whether a compiler has traced a pass. What it compiled notes nothing when it runs."""
    _ran: bool = False
    read_past: bool = False
    """Whether the pass of another module has read a weight of this one (``lpq/nn/read_past.py``)."""

    compared: Compared | None = None
    """The check that ranks have the same model, if lpq gathers none of its weights."""

    @property
    def called(self) -> bool:
        """Whether a pass ran outside of compiled code."""
        return self._ran

    @once_when_traced
    def note_pass(self, traced: bool, shared: bool = False) -> bool:
        """Note that a pass runs, or that a compiler traces one, which takes the answer as a constant. In a ``shared``
        one ranks send each other operands."""
        self.__dict__["traced" if traced else "_ran"] = True
        if not is_exporting():
            if traced and shared and self.compared is not None:
                self.compared.before_trace()
            if torch.is_grad_enabled():
                self.compare_in_pass(first=True)
        return True

    def compare_in_pass(self, first: bool) -> None:
        """Compare the model with the other ranks' in a pass that trains this layer; ``first``: the first one of its
        kind."""
        if first and self.compared is None:
            from lpq.distributed.compared import Compared

            Compared.give(self)
        if self.compared is not None:
            self.compared.in_pass()

    def kept(self) -> tuple[Memory, ...]:
        """The buffers of its present recipe."""
        raise NotImplementedError(f"{type(self).__name__} does not list what it remembers")

    def memories(self) -> dict[str, Tensor]:
        """All that its quantizers remember across steps, by the names of the buffers."""
        return {memory.name: getattr(self, memory.name) for memory in self.kept()}

    def states(self, stack: str = "") -> dict[str, dict[str, Tensor]]:
        """The state of each tensor that has one, by the keys of its quantizer; of a ``stack`` if there are several."""
        return states_of(self, [memory for memory in self.kept() if memory.stack == stack])

    def static_values(self) -> dict[str, Tensor]:
        """The buffers that no step moves: ``lpq.calibrate`` finds their values."""
        return {memory.name: getattr(self, memory.name) for memory in self.kept() if not memory.moves}

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which nobody observes."""
        return {key: value for key, value in self.__dict__.items() if key != "observers"}

    def forget_calls(self) -> None:
        """Check inputs and static values anew in the next pass."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, memory in self.memories().items():
            if prefix + name in state_dict and state_dict[prefix + name].shape != memory.shape:
                del state_dict[prefix + name]  # another recipe's, which remembers more steps or fewer
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing: list[str] = args[2]
        unexpected: list[str] = args[3]
        for name, memory in self.memories().items():
            if prefix + name in missing:
                missing.remove(prefix + name)
                device = next(self.parameters()).device
                fresh = memory.is_meta and device.type != "meta"
                setattr(self, name, torch.zeros_like(memory, device=device) if fresh else memory.zero_())
        self.forget_calls()
        others = tuple(f"{prefix}{owner}_" for owner in self.owners)
        unexpected[:] = [k for k in unexpected if not k.startswith(others) or "." in k[len(prefix) :]]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        state = self.memories()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in state.items():  # .to(torch.bfloat16) is meant for the weights
            device = getattr(self, name).device
            fresh = before.is_meta and device.type != "meta"
            setattr(self, name, torch.zeros_like(before, device=device) if fresh else before.to(device))
        return self


def states_of(module: nn.Module, memories: Iterable[Memory]) -> dict[str, dict[str, Tensor]]:
    """The state of each tensor that these buffers are of, by the keys of its quantizer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor, key, *_ in memories:
        found.setdefault(tensor, {})[key] = getattr(module, name)
    return found
