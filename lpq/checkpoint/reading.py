"""Reading DCP's files, of which none can run code: the index is unpickled into what an index is made of, no more."""

from __future__ import annotations

import pickle
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lpq.checkpoint.errors import CheckpointError

DCP = "torch.distributed.checkpoint."
KNOWN = {
    f"{DCP}metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    f"{DCP}filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # where Python 3.13 has them
}  # fmt: skip


class Reader(FileSystemReader):
    """Reads a checkpoint's tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the files."""
        with self.fs.create_stream(self._get_metadata_path(), "rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def saved(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The shape and dtype of each tensor."""
        found = {}
        for name, entry in self.read_metadata().state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # DCP would unpickle it, whatever it is
                raise CheckpointError(f"{name} is no tensor, and lpq.checkpoint.save saves nothing else there")
            found[name] = (entry.size, entry.properties.dtype)
        return found


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in KNOWN.get(module, ()):
            raise CheckpointError(f"its index refers to {module}.{name}, which is no part of an index: do not trust it")
        return super().find_class(module, name)


def _member(of: Any, name: Any) -> Enum:
    """In place of ``getattr``, by which some releases of Python 3.11 pickle members of an ``Enum``, and no more."""
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        raise CheckpointError(f"its index refers to {name} of {of}, which is no part of an index: do not trust it")
    return of.__members__[name]
