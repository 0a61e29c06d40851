"""The optimizer inside a wrapper, such as accelerate's, which passes all calls on to it."""

from __future__ import annotations

from torch.optim import Optimizer

from lpq.optim.masters import MasterWeights
from lpq.optim.states import QuantizedStates


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state of this optimizer: the wrapped one, or, as for the wrappers of ``lpq.optim``,
    this one itself."""
    inner = getattr(optimizer, "optimizer", None)
    ours = isinstance(optimizer, MasterWeights | QuantizedStates)
    if ours or not isinstance(inner, Optimizer) or inner.state is not optimizer.state:
        return optimizer
    return unwrapped(inner)
