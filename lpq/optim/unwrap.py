"""The optimizer inside a wrapper, such as accelerate's, which passes all calls on to it."""

from __future__ import annotations

from torch.optim import Optimizer

from lpq.optim.wrapper import Wrapper


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state of this optimizer: the wrapped one, or, as for the wrappers of ``lpq.optim``,
    this one itself."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, Wrapper) or not isinstance(inner, Optimizer) or inner.state is not optimizer.state:
        return optimizer
    return unwrapped(inner)
