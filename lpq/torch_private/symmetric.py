"""Symmetric memory: GPUs that read each other's memory, by their copy engines. In torch 2.11 and 2.13.

A group is given by its name. torch keeps one workspace for a group, so all calls must be on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

memory: Any = _symmetric_memory  # whose names of groups are a type of their own


def serves(device: torch.device) -> bool:
    """Whether tensors on a device of this kind can be gathered in this way."""
    return device.type == "cuda"


def why_not(mesh: DeviceMesh) -> str | None:
    """Why the GPUs of a mesh cannot read each other's memory; None if they can, or if there are none. A collective."""
    try:
        if mesh.device_type == "cuda":
            memory.get_symm_mem_workspace(mesh.get_group().group_name, 1)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def gather_and_consume(
    parts: Sequence[Tensor],
    consume: Callable[[list[Tensor], int], None],
    whole: Sequence[Tensor],
    group: str,
    whole_needed: bool,
) -> None:
    """Gather the ranks' ``parts``, bytes, into ``whole``, and call ``consume`` with the bytes of one rank and its
    number as they arrive: this rank's first. Calls may be on another stream, for which the current one waits at the
    end. This rank's bytes are put into ``whole`` only if it is needed."""
    workspaces, size = memory._group_name_to_workspace_tensor, sum(part.numel() for part in parts)
    before = workspaces.get(group)
    if before is None or before.numel() < size:
        memory.get_symm_mem_workspace(group, 1 << (size - 1).bit_length())
        workspaces[group].before = before  # a recorded graph may still read it
    memory._pipelined_multi_all_gather_and_consume(list(parts), consume, list(whole), group, whole_needed)
