"""How tests seed where there is no GPU."""

from __future__ import annotations

import torch


def seed_the_cpu_alone() -> None:
    """Have ``torch.manual_seed`` seed no GPUs, of which there are none. Torch would keep the stack of each call for
    each kind of GPU, to seed one that is used later, which takes up to half a millisecond."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = _nothing


def _nothing(seed: int) -> None: ...
