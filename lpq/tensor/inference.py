"""Inference mode: tensors that are made in it serve inference alone, so tensors for training, too, leave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def normal_tensors(wanted: bool = True) -> Iterator[None]:
    """Make tensors inside that also serve training, where inference mode is on."""
    if not wanted or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
