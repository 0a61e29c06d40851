"""A mode that watches, and changes nothing."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watched(TorchDispatchMode):
    """A mode for which a step goes through the dispatcher, where lpq runs as operators.

    torch's own ``FlopCounterMode`` takes some operators apart, and then sums in another order.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
