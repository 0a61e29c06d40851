"""Inference mode: tensors that are made in it serve inference alone. Those that training uses, too, must not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def normal_tensors(wanted: bool = True) -> Iterator[None]:
    """Make the tensors inside fit for training, too, where inference mode is on."""
    if not wanted or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
