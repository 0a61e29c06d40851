"""How tests seed where there is no GPU."""

from __future__ import annotations

import torch


def seed_the_cpu_alone() -> None:
    """Have ``torch.manual_seed`` seed the CPU alone, as there is no GPU.

    Torch would keep the stack of each call, once for each kind of GPU, to seed a GPU that is used later. That takes up
    to half a millisecond.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = _nothing


def _nothing(seed: int) -> None: ...
