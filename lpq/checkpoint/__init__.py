"""Checkpoints of models and optimizers, sharded or not, on ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a directory: DCP's files, ``index.json`` (where they have each tensor), ``lpq.json`` (step, policy,
quantizers), ``extra.pt`` and ``manifest.json`` (size and SHA-256 of each of them). It is written beside its place and
renamed when it is whole. A quantized tensor is saved as its buffers, each a plain tensor with its own placement, so
that a checkpoint loads bit for bit on another number of ranks and PyTorch reads it without the plugin. Nothing in it is
run: its JSON is data, and all else is read as ``torch.load(…, weights_only=True)`` reads it. All ranks call these
functions together; an error on one rank is the same error on all.
"""

from lpq.checkpoint.background import Saving
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, MissingPlugin, NoCheckpoint
from lpq.checkpoint.former_names import export_file
from lpq.checkpoint.info import Info, info
from lpq.checkpoint.loading import load
from lpq.checkpoint.saving import save, save_async
from lpq.checkpoint.single import import_file

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Info",
    "MissingPlugin",
    "NoCheckpoint",
    "Saving",
    "export_file",
    "import_file",
    "info",
    "load",
    "save",
    "save_async",
]
