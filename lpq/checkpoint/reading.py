"""Reading a checkpoint's tensors through DCP, which gets the index that was judged and unpickles nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future

from lpq.checkpoint import files
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.index import read_index


class Reader(FileSystemReader):
    """Reads a checkpoint's tensors, each as ``torch.load(…, weights_only=True)`` reads. DCP would read bytes in another
    way, and an index that was judged has none."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """``sizes``: of the files, as the manifest has them."""
        super().__init__(path)
        self.begun = False
        """Whether tensors are being filled."""
        self._folder, self._sizes = path, sizes
        self._index = read_index(path, sizes)
        self._index.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, which is read once."""
        return self._index

    def saved(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The shape and dtype of each tensor."""
        entries = self._index.state_dict_metadata.items()
        return {n: (e.size, e.properties.dtype) for n, e in entries if isinstance(e, TensorStorageMetadata)}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Make sure that the files from which this rank reads are here, before any rank reads."""
        for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
            if (found := files.fault(self._folder, name, self._sizes[name], None)) is not None:
                raise CheckpointError(found)
        return plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the tensors."""
        self.begun = True
        return super().read_data(plan, planner)
