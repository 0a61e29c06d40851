"""The optimizer that another one stands for, as accelerate's does: it hands on all that it is asked."""

from __future__ import annotations

from torch.optim import Optimizer

from lpq.optim.masters import MasterWeights


def itself(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose state it is. One that keeps state of its own, as ``MasterWeights`` does, is that itself."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, MasterWeights) or not isinstance(inner, Optimizer) or inner.state is not optimizer.state:
        return optimizer
    return itself(inner)
