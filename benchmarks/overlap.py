"""How layers that ranks share out are compiled, so that what is sent overlaps products or does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from lpq.bench.contenders import Contender


def options(contender: Contender, overlapped: bool, in_order: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the arguments of ``compile``; set what the compiler takes from its configuration alone for this contender.

    In bf16 the compiler itself cuts products up, so that they begin with what has arrived. lpq does that by itself, and
    ``in_order`` keeps its operators in the order in which it wrote them: the compiler's own takes the least memory, and
    waits earlier.
    """
    cuts_up = overlapped and contender.library == "torch"
    torch._inductor.config._micro_pipeline_tp = cuts_up
    if cuts_up:
        enable_symm_mem_for_group(group.group_name)
    if in_order and contender.library == "lpq":
        of_mode = torch._inductor.list_mode_options(contender.mode or "default")
        return {"options": of_mode | {"reorder_for_peak_memory": False}}
    return {"mode": contender.mode}
