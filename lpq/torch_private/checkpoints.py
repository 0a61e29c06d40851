"""Names in what torch writes to disk: of places in the index of a distributed checkpoint, and in state dicts."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["EXTRA_STATE", "StorageInfo"]

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a state dict has the result of a module's ``get_extra_state``."""
