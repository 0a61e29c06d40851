"""The ranks that hold the same parameters because a DistributedDataParallel keeps them equal.

Nothing in such a parameter tells of it, and torch keeps no list of the wrappers, so that they are sought among all
objects. Parameters that no wrapper has are their rank's own, as those of a stage of a pipeline are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import cached_property

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """The wrappers of this process, as they are when they are first asked: once for all models of an optimizer."""

    def of(self, params: Iterable[Tensor]) -> list[ProcessGroup]:
        """The groups over which these parameters are replicated."""
        ids = {id(param) for param in params if not hasattr(param, "device_mesh")}
        found = [ref() for ref, own in self._wrappers if own & ids] if ids else []
        return [wrapper.process_group for wrapper in found if wrapper is not None]

    @cached_property
    def _wrappers(self) -> list[tuple[weakref.ref[DistributedDataParallel], set[int]]]:
        """The wrappers, and the ids of the parameters of each but for those that it is to ignore."""
        gc.collect()  # else it would depend on when a rank did it last
        found = []
        for wrapper in gc.get_objects():
            # isinstance() may run code; and one whose making raised has no reducer
            if issubclass(type(wrapper), DistributedDataParallel) and "reducer" in vars(wrapper):
                named = wrapper.module.named_parameters()
                own = {id(param) for name, param in named if name not in wrapper.parameters_to_ignore}
                found.append((weakref.ref(wrapper), own))
        return found
