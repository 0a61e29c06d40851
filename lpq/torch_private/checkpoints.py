"""Names in what torch writes to disk: in the index of a distributed checkpoint, and in state dicts."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["EXTRA_STATE", "FILESYSTEM", "METADATA", "STORAGE_INFO", "StorageInfo"]

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a state dict has the result of a module's ``get_extra_state``."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
STORAGE_INFO = f"{FILESYSTEM}.{StorageInfo.__name__}"
