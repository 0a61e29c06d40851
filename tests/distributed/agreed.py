"""Errors that all ranks must raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lpq.observe import Collective

COMPARED = Collective("all_reduce", 32)
"""By which ranks see that all have the same input, or are at the same step of a policy."""
SOON = 30
"""Seconds: a fraction of the timeout of the process group."""


def agreed(work: Callable[[], Any], errors: Any = (ValueError, RuntimeError, TypeError)) -> list[str]:
    """The errors of all ranks, every one of which raises, soon."""
    start = time.monotonic()
    with pytest.raises(errors) as raised:
        work()
    assert time.monotonic() - start < SOON
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, f"{type(raised.value).__name__}: {raised.value}")
    return found
