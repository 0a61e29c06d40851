"""The file format safetensors, written tensor by tensor and read without trust.

A file is the length of its header (8 bytes), the header (JSON: of each tensor its dtype, its shape and where it lies)
and the tensors. A header is known from shapes alone, so a file is written while one tensor is in memory. Where each
lies is decided by dtype and name, so that the bytes do not depend on the order in which they come.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
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
"""The most bytes of a header: some 150,000 tensors, which take four seconds. Other readers take 100 MB."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of files of ``torch.save`` and of ``pickle``."""


@dataclass(frozen=True)
class Shown:
    """The dtype and the shape of a tensor in a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def bytes(self) -> int:
        """The number of bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Writer:
    """A file that is being written; its tensors come in any order, each once."""

    def __init__(self, path: Path, tensors: Mapping[str, Shown]) -> None:
        self._left, self._begin = dict(tensors), dict[str, int]()
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        end = 0
        for name in sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n)):  # so each is aligned
            shown = tensors[name]
            if shown.dtype not in NAMES:
                raise CheckpointError(f"{name} is {shown.dtype}, which safetensors has no name for: cast it")
            begin, end = end, end + shown.bytes
            self._begin[name] = begin
            header[name] = {"dtype": NAMES[shown.dtype], "shape": list(shown.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)
        self._file.truncate(self._start + end)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one of its tensors."""
        shown = self._left.pop(name)
        found = Shown(tensor.dtype, tuple(tensor.shape))
        assert found == shown, f"{name}: {found} where {shown} was announced"
        self._file.seek(self._start + self._begin[name])
        data = row_major(tensor.detach().cpu())
        if count := data.nbytes:
            self._file.write(memoryview((ctypes.c_char * count).from_address(data.data_ptr())))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait until it is on the disk."""
        assert kind is not None or not self._left, f"never written: {[*self._left]}"
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


class Reader:
    """A file whose header is checked; each tensor is read when it is looked up."""

    def __init__(self, path: Path) -> None:
        """``path`` is an ordinary file. An error names it and its fault."""
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                self._start, header = _header(file.read(8), file, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else None
        except CheckpointError as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
        header.pop(METADATA, None)
        self.tensors: dict[str, Shown] = {}
        self._begin: dict[str, int] = {}
        spans = []
        for name, entry in header.items():
            shown, begin, end = _entry(path.name, name, entry)
            self.tensors[name], self._begin[name] = shown, begin
            spans.append((begin, end, name))
        _check_spans(path.name, spans, size - self._start)

    def read(self, name: str) -> Tensor:
        """A copy of one of its tensors."""
        shown = self.tensors[name]
        if not shown.bytes:
            return torch.empty(shown.shape, dtype=shown.dtype)
        assert self._map is not None
        place = self._start + self._begin[name]
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=shown.bytes, offset=place).clone()
        return data.view(shown.dtype).view(shown.shape)


def _header(first: bytes, file: Any, size: int) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(first, "little")
    if length > LONGEST and length <= size - 8:
        raise CheckpointError(f"its header has {length} bytes, and at most {LONGEST} are read: save it in more files")
    if len(first) < 8 or length > size - 8:
        if first.startswith(PICKLES):
            raise CheckpointError(
                "it is a pickle, as torch.save writes them, and no safetensors: pickles can run code, and are not read"
            )
        raise CheckpointError(f"it is no safetensors, or truncated: its header does not end within its {size} bytes")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError("its header is no table of tensors")
    return 8 + length, header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _entry(file: str, name: str, entry: Any) -> tuple[Shown, int, int]:
    def number(value: object) -> bool:
        return type(value) is int and 0 <= value < 2**62

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        not isinstance(shape, list)
        or not isinstance(span, list)
        or len(span) != 2
        or not all(map(number, shape + span))
    ):
        raise CheckpointError(f"{file}: its header describes {brief(name)} as nothing that is a tensor: it was changed")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{file}: {brief(name)} is of dtype {brief(dtype)}, which is none that is read here")
    shown = Shown(DTYPES[dtype], tuple(shape))
    if span[1] - span[0] != shown.bytes:
        raise CheckpointError(
            f"{file}: {brief(name)} is {dtype} {shape}, of {shown.bytes} bytes, and its header gives it "
            f"{span[1] - span[0]}: it was changed"
        )
    return shown, span[0], span[1]


def _check_spans(file: str, spans: Iterable[tuple[int, int, str]], size: int) -> None:
    """Make sure that tensors lie one behind the other and end with the file."""
    end = 0
    for begin, stop, name in sorted(spans):
        if stop > size:
            raise CheckpointError(f"{file} is truncated: {brief(name)} ends {stop - size} bytes behind its end")
        if begin != end:
            raise CheckpointError(
                f"{file}: {brief(name)} does not begin where the tensor before it ends: it was changed"
            )
        end = stop
    if end != size:
        raise CheckpointError(f"{file} has {size - end} bytes behind its last tensor: it was changed")
