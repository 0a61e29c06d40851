"""Where groups of rows end: as a tensor on the device of the rows, and as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as sums

import torch
from torch import Tensor

from lpq.formats.sections import bounds


def as_offsets(title: str, offs: Tensor | Sequence[int], groups: int, x: Tensor) -> Tensor:
    """Return where each group ends, as a tensor on the device of ``x``. The values of a tensor are checked where they
    are read."""
    if isinstance(offs, Tensor):
        if offs.dtype != torch.int32 or offs.device != x.device:
            raise TypeError(
                f"{title}: offs is {offs.dtype} on {offs.device}, and must be torch.int32 on {x.device}, where the "
                "input is: counts.cumsum(0, dtype=torch.int32)"
            )
        if offs.shape != (groups,):
            raise ValueError(
                f"{title}: offs is {list(offs.shape)}, and there are {groups} groups: pass one end for each"
            )
        return offs
    if not isinstance(offs, Sequence):
        raise TypeError(
            f"{title}: offs is a {type(offs).__name__}: pass where each group ends, as an int32 tensor on {x.device}, "
            "or a list of how many rows each group has"
        )
    counts = list(offs)
    if len(counts) != groups or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError(
            f"{title}: the counts are {counts}, and there are {groups} groups: pass for each how many rows it "
            "has, as an int"
        )
    if sum(counts) > x.shape[0]:
        raise ValueError(f"{title}: the counts sum to {sum(counts)}, and the input has {x.shape[0]} rows")
    if not x.is_cuda or torch.compiler.is_compiling():
        return torch.tensor([*sums(counts)], dtype=torch.int32, device=x.device)
    ends = torch.tensor([*sums(counts)], dtype=torch.int32).pin_memory()
    return ends.to(x.device, non_blocking=True)  # from other memory it would wait


def read(offs: Tensor, rows: int) -> list[int]:
    """Read the offsets to the host; raise if they do not grow or lie outside of the rows."""
    ends: list[int] = offs.tolist()
    if any(stop < start for start, stop in bounds(ends)):
        raise ValueError(f"offs is {ends}: it is where each group ends, so it must grow: counts.cumsum(0)")
    if ends and ends[-1] > rows:
        raise ValueError(f"offs is {ends}, and there are {rows} rows: no group ends behind the last row")
    return ends
