"""Reading a checkpoint's tensors through DCP, which gets the index that was judged and unpickles nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future

from lpq.checkpoint.errors import CheckpointError, tensor_name
from lpq.checkpoint.index import read_index
from lpq.checkpoint.pickles import check_archive
from lpq.files import disk
from lpq.files.safetensors import TensorKind

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _Part(RawIOBase):
    """A part of a file, as a file of its own: ``zipfile`` of some versions takes no archive that begins later."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(f"no file has a byte {at}")
        self._at = at
        return at

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer)[: max(self._size - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(into)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint's tensors, each as ``torch.load(…, weights_only=True)`` reads. DCP would cast a piece that has
    another dtype than its index says, and read bytes in another way; an index that was judged has none."""

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

    def saved(self) -> dict[str, TensorKind]:
        """The shape and dtype of each tensor."""
        entries = self._index.state_dict_metadata.items()
        return {n: TensorKind(e.size, e.properties.dtype) for n, e in entries if isinstance(e, TensorStorageMetadata)}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Make sure that the files from which this rank reads are here, before any rank reads."""
        pieces = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        for name in sorted({piece.relative_path for piece in pieces.values()}):
            if (fault := disk.fault(self._folder, name, self._sizes[name], None)) is not None:
                raise CheckpointError(fault)
        for index, piece in pieces.items():
            with self._naming(index), (self._folder / piece.relative_path).open("rb") as file:
                check_archive(_Part(file, piece.offset, piece.length), piece.length)
        return plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the tensors."""
        self.begun = True
        for item in plan.items:
            with self._naming(item.storage_index):
                piece = self._piece(item.storage_index)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _piece(self, index: MetadataIndex) -> Tensor:
        """A piece of a tensor, of the dtype and the shape that the index has."""
        place = self.storage_data[index]
        with (self._folder / place.relative_path).open("rb") as file:
            part: Any = _Part(file, place.offset, place.length)
            piece: Tensor = torch.load(part, map_location="cpu", weights_only=True)
        entry: Any = self._index.state_dict_metadata[index.fqn]
        if piece.dtype != entry.properties.dtype or piece.shape not in [
            chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset
        ]:
            raise ValueError
        return piece

    @contextmanager
    def _naming(self, index: MetadataIndex) -> Iterator[None]:
        """Name the file and the tensor in an error inside. The file has its digest, so torch's words lead nowhere."""
        try:
            yield
        except Exception as error:
            why: object = "it differs from the index, so one of the two was changed"
            if isinstance(error, OSError):
                why = error.strerror or error
            elif isinstance(error, CheckpointError | MemoryError):
                why = error
            name = self.storage_data[index].relative_path
            raise CheckpointError(f"{name} cannot be read for its piece of {tensor_name(index.fqn)}: {why}") from error
