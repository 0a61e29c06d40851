"""Functions of earlier versions, which work for one version."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn

from lpq.checkpoint.single import write_file
from lpq.registry.warning import deprecate


def export_file(
    path: str | Path, model: nn.Module, *, decode: bool = False, process_group: dist.ProcessGroup | None = None
) -> Path:
    """Deprecated: call ``lpq.export(model, path, layout="lpq")``, which writes the same file."""
    call = f'lpq.export(model, path, layout="lpq"{", decode=True" if decode else ""})'
    deprecate("lpq.checkpoint.export_file", gone_in="0.2", now=f"call {call}")
    return write_file(model, path, decode, process_group)[0]
