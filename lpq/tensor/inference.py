"""Inference mode: what is made in it is for inference alone. What is kept for training too must not be so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def normal_tensors(wanted: bool = True) -> Iterator[None]:
    """Tensors that are made inside serve training too, also where inference mode is on."""
    if not wanted or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
