"""The optimizer that another one stands for: accelerate's, for instance, passes all calls on to the one inside."""

from __future__ import annotations

from torch.optim import Optimizer

from lpq.optim.masters import MasterWeights


def itself(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state of this optimizer: the wrapped one, or, as for ``MasterWeights``, this one
    itself."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, MasterWeights) or not isinstance(inner, Optimizer) or inner.state is not optimizer.state:
        return optimizer
    return itself(inner)
