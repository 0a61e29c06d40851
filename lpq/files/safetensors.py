"""Files of safetensors: written here tensor by tensor, and read by that library, which judges their headers.

A file is the length of its header (8 bytes), the header (JSON: of each tensor its dtype, its shape and where it lies)
and the tensors. A header is known from shapes alone, so a file is written while one tensor is in memory. The place of
each tensor is decided by dtype and name, so that the bytes do not depend on the order of writing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lpq.files.disk import json_of
from lpq.files.errors import CheckpointError
from lpq.formats.layout import row_major
from lpq.registry.showing import brief

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
LONGEST = 16 << 20
"""The most bytes of a header: some 150,000 tensors, which take three seconds. Other readers take 100 MB."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of files of ``torch.save`` and of ``pickle``."""


class TensorKind(NamedTuple):
    """The shape and the dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def bytes(self) -> int:
        """The number of bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Writer:
    """A file that is being written; its tensors come in any order, each once."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorKind]) -> None:
        self._pending, self._begin = dict(tensors), dict[str, int]()
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        end = 0
        for name in sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n)):  # so each is aligned
            kind = tensors[name]
            if kind.dtype not in NAMES:
                raise CheckpointError(f"{name} is {kind.dtype}, which safetensors has no name for: cast it")
            begin, end = end, end + kind.bytes
            self._begin[name] = begin
            header[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)
        self._file.truncate(self._start + end)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one of its tensors."""
        kind = self._pending.pop(name)
        actual = TensorKind.of(tensor)
        assert actual == kind, f"{name}: {actual} where {kind} was announced"
        self._file.seek(self._start + self._begin[name])
        data = row_major(tensor.detach().cpu())
        if count := data.nbytes:
            self._file.write(memoryview((ctypes.c_char * count).from_address(data.data_ptr())))

    def close(self, *, failed: bool = False) -> None:
        """Wait until it is on the disk, unless writing has ``failed``."""
        assert failed or not self._pending, f"never written: {[*self._pending]}"
        if not failed:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


class Reader:
    """A file whose header is judged; each tensor is read when it is looked up."""

    def __init__(self, path: Path) -> None:
        """``path`` is an ordinary file. An error names it and its fault."""
        self.path = path
        try:
            with path.open("rb") as file:
                first, size = file.read(8), path.stat().st_size
                length = int.from_bytes(first, "little")
                _check_begin(first, length, size)
                # Were it mapped to memory, the process would end by a signal if the file were cut off meanwhile.
                self._file: Any = safe_open(path, "pt", backend="pread")
                header = json_of(file.read(length))
        except CheckpointError as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path.name} is no safetensors, was cut off or changed: {error}") from error
        header.pop(METADATA, None)
        for name, entry in header.items():
            if (dtype := entry["dtype"]) not in DTYPES:
                raise CheckpointError(f"{path.name}: {brief(name)} is of dtype {dtype!r}, which is none that lpq reads")
        self.tensors = {name: TensorKind(tuple(e["shape"]), DTYPES[e["dtype"]]) for name, e in header.items()}

    def read(self, name: str) -> Tensor:
        """A copy of one of its tensors."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path.name} was changed while it was read: {error}") from error
        return tensor


def _check_begin(first: bytes, length: int, size: int) -> None:
    """Refuse files by their first bytes: a pickle, or a header that would take long to read."""
    if first.startswith(PICKLES) and length > size:
        raise CheckpointError("it is a pickle, as torch.save writes them: pickles can run code, and are not read")
    if LONGEST < length <= size:
        raise CheckpointError(f"its header has {length} bytes, and at most {LONGEST} are read: save it in more files")
