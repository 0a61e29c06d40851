"""Collectives, process groups and wrappers of modules, without FSDP2 and DTensor, which have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.distributed_c10d import Store as Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from lpq.torch_private.compiling import once_when_traced

COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of the operators that collectives run, at once and when they are waited for."""

SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of these namespaces that send nothing."""

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
}
"""The collectives of these operators, by their names."""


active_replica: Callable[[], Any] = partial(getattr, DistributedDataParallel, "_active_ddp_module")
"""The ``DistributedDataParallel`` inside of whose forward this runs; None outside of any."""


@once_when_traced
def outlasts_ranks() -> bool:
    """Whether a ``DistributedDataParallel`` runs here that goes on without a rank which has no batch left."""
    if (replica := active_replica()) is None or replica.process_group.size() == 1:
        return False
    return bool(replica._join_config.enable and not replica._join_config.throw_on_early_termination)


name_group: Callable[[Any, ProcessGroup], None] = _register_process_group
"""Give a group the name by which operators find it."""

forget_group: Callable[[Any], None] = _unregister_process_group
"""Take the name from its group."""

work_of: Callable[[torch.futures.Future[Any]], Any] = _create_work_from_future
"""The work of a collective that a group written in Python returns: it ends with the future."""


def device_types(group: ProcessGroup) -> list[torch.device]:
    """Return the kinds of devices for which a group has a backend."""
    return group._device_types


group_named: Callable[[Any], ProcessGroup] = _resolve_process_group
"""The group with this name."""


job_store: Callable[[], Store] = _get_default_store
"""The store by which the processes of the job found each other."""


def job_timeout() -> float:
    """How long the processes of the job wait for each other in a collective, in seconds; where the backends do not tell
    it, the timeout of the store."""
    group: Any = dist.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types]
    waits: list[timedelta] = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
    of_store: timedelta = job_store().timeout  # type: ignore[attr-defined]  # torch's stubs lack it
    return min(waits, default=of_store).total_seconds()


def is_imitated() -> bool:
    """Whether this process has the ranks to itself: torch's backend ``fake``, for trials, sends nothing."""
    return dist.is_initialized() and dist.get_backend() == "fake"
