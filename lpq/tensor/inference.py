"""Inference mode: tensors that are made in it serve inference alone, so tensors for training, too, leave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def normal_tensors(serve_training: bool = True) -> AbstractContextManager[None]:
    """Make tensors inside that also serve training, where inference mode is on."""
    return _outside() if serve_training and torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
