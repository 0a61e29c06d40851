"""The ranks that hold the same parameters because a DistributedDataParallel keeps them equal.

Nothing in such a parameter tells of it, so that the wrappers are asked. Parameters that none of them has are their
rank's own, as those of a stage of a pipeline are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from lpq.distributed.alive import alive


class Replicas:
    """The wrappers of this process, as they are when they are first asked."""

    def of(self, params: Iterable[Tensor]) -> list[ProcessGroup]:
        """The groups over which these parameters are replicated."""
        ids = {id(param) for param in params if not hasattr(param, "device_mesh")}
        return [group for group, own in self._wrapped if own & ids] if ids else []

    @cached_property
    def _wrapped(self) -> list[tuple[ProcessGroup, set[int]]]:
        """The group of each wrapper, and the ids of its parameters but for those that it is to ignore."""
        found = []
        for wrapper in alive(DistributedDataParallel):
            named = wrapper.module.named_parameters()
            found.append(
                (wrapper.process_group, {id(p) for name, p in named if name not in wrapper.parameters_to_ignore})
            )
        return found
