"""Names in what torch writes to disk: in the index of a distributed checkpoint, and in state dicts."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["EXTRA_STATE", "FILESYSTEM", "IN_AN_INDEX", "METADATA", "STORAGE_INFO", "StorageInfo"]

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a state dict has what a module's ``get_extra_state`` returned."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
STORAGE_INFO = f"{FILESYSTEM}.{StorageInfo.__name__}"
IN_AN_INDEX = {
    METADATA: {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    FILESYSTEM: {StorageInfo.__name__},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}  # fmt: skip
"""The names of torch that an index refers to, by module."""
