"""The ranks that hold the same parameters because a DistributedDataParallel keeps them equal.

Such a parameter has no mark, and torch keeps no list of the wrappers. But torch says inside of whose forward a pass
runs, so layers note it. Parameters without a wrapper are their rank's own, as in a stage of a pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """The wrappers in whose forward layers of a model have run."""

    def __init__(self) -> None:
        self._wrappers: list[tuple[weakref.ref[DistributedDataParallel], set[int]]] = []
        """The wrappers, and the ids of the parameters of each, without the parameters that it is to ignore."""

    @property
    def noted(self) -> bool:
        """Whether there is such a wrapper."""
        return bool(self._wrappers)

    def note(self, wrapper: DistributedDataParallel) -> bool:
        """Note a wrapper; return whether it is new."""
        if any(ref() is wrapper for ref, _ in self._wrappers):
            return False
        parameters = wrapper.module.named_parameters()
        own = {id(param) for name, param in parameters if name not in wrapper.parameters_to_ignore}
        self._wrappers.append((weakref.ref(wrapper), own))
        return True

    def of(self, params: Iterable[Tensor]) -> list[ProcessGroup]:
        """The groups over which these parameters are replicated."""
        ids = {id(param) for param in params if not hasattr(param, "device_mesh")}
        wrappers = [ref() for ref, own in self._wrappers if own & ids]
        return [wrapper.process_group for wrapper in wrappers if wrapper is not None]
