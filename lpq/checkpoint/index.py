"""The index of a checkpoint (``.metadata``): which tensors it has, and where in which file each piece of them lies.

It is a pickle, and whoever edits a pickle writes a program. So nothing that it names is looked up, called or changed:
it is read once, into records that hold what stood there, and the index is made anew of those numbers and strings that
an index must have. All else in the file is left out or refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import Counter
from collections.abc import ItemsView, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lpq.checkpoint.errors import CheckpointError, shown
from lpq.torch_private.checkpoints import IN_AN_INDEX, METADATA, STORAGE_INFO, StorageInfo

INDEX = ".metadata"
KNOWN = {
    **IN_AN_INDEX,
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # where Python 3.13 has them
    "builtins": {"getattr"},  # by which some releases of Python 3.11 pickle members of an Enum
}
"""The names to which DCP's indexes refer. Most are not needed here; any other name is an error that names it."""
LIMIT = 2**62
"""A number above all sizes and offsets."""
DIMENSIONS = 64
"""The most dimensions that a tensor of torch has."""
OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip
"""The instructions of which ``pickle.dump`` makes an index. None of them takes more memory than it has bytes."""
CODES = {ord(known.code) for known in pickletools.opcodes if known.name in OPCODES}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""The dtypes by name. A name is not looked up in ``torch``, which imports much for some."""


class Record:
    """The record of an object in the pickle: the arguments that would make it, and the state that it would get.

    There is one subclass for each name in a file, made for that file alone. A pickle can call or set nothing on it or
    on a record but these two methods; and called on the class, ``__setstate__`` lacks its ``self``.
    """

    __slots__ = ("args", "state")
    name = ""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Python's unpickler in Python: its memo is a table, and its keys can be judged before they are hashed."""

    dispatch: ClassVar = {
        **{code: run for code, run in pickle._Unpickler.dispatch.items() if code in CODES},
        pickle.SETITEM[0]: lambda reader: _set(reader, pickle.SETITEM[0], slice(-2, -1)),
        pickle.SETITEMS[0]: lambda reader: _set(reader, pickle.SETITEMS[0], slice(None, None, 2)),
    }

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._known: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        full = f"{module}.{name}"
        if not (module == "torch" and name in DTYPES) and name not in KNOWN.get(module, ()):
            raise CheckpointError(f"it refers to {full[:200]!r}, which is no part of an index: do not trust it")
        if full not in self._known:
            self._known[full] = type(name, (Record,), {"__slots__": (), "name": full})
        return self._known[full]


def _set(reader: Any, code: int, keys: slice) -> None:
    """Set items whose keys are texts or records: the hash of a nested tuple may take for ever."""
    if not all(type(key) is str or isinstance(key, Record) for key in reader.stack[keys]):
        _refuse("the name of a tensor")
    pickle._Unpickler.dispatch[code](reader)


def read_index(path: Path, sizes: Mapping[str, int]) -> Metadata:
    """Read the index of the checkpoint in this directory. ``sizes``: those of its files in its manifest.

    Each tensor is covered by its pieces, and each piece lies in one of the files.
    """
    try:
        read = _Unpickler(io.BytesIO((path / INDEX).read_bytes())).load()
        return _made(read, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"its index ({INDEX}) is refused: {error}") from error
    except OSError:
        raise
    except Exception as error:  # what is no pickle raises anything
        raise CheckpointError(
            f"its index ({INDEX}) is refused: it is no index of tensors ({type(error).__name__}); do not trust it"
        ) from error


def _made(read: Any, sizes: Mapping[str, int]) -> Metadata:
    """The index that a record of one describes."""
    whole = _state(read, f"{METADATA}.Metadata", "state_dict_metadata", "storage_data")
    places: dict[MetadataIndex, StorageInfo] = {}
    filled = Counter[str]()
    for key, value in _entries(whole["storage_data"]):
        index, place = _index(key), _place(value, sizes)
        if index in places:
            raise CheckpointError(f"it has a piece of {shown(index.fqn)} twice: do not trust it")
        places[index] = place
        filled[place.relative_path] += place.length
    if shared := [name for name, length in filled.items() if length > sizes[name]]:
        raise CheckpointError(f"its pieces have more bytes than {shared[0]}, in which they lie: do not trust it")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in _entries(whole["state_dict_metadata"]):
        if type(name) is not str:
            _refuse("the name of a tensor")
        tensors[name] = _tensor(name, entry, places)
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _tensor(name: str, entry: Any, places: Mapping[MetadataIndex, StorageInfo]) -> TensorStorageMetadata:
    if _is(entry, f"{METADATA}.BytesStorageMetadata"):
        raise CheckpointError(f"{shown(name)} is no tensor, and lpq.checkpoint.save saves nothing else there")
    found = _state(entry, f"{METADATA}.TensorStorageMetadata", "properties", "size", "chunks")
    dtype, size = _dtype(found["properties"]), _size(found["size"])
    if type(found["chunks"]) is not list:
        _refuse(f"the pieces of {shown(name)}")
    chunks, covered, begun = [], 0, set[torch.Size]()
    for piece in found["chunks"]:
        fields = _state(piece, f"{METADATA}.ChunkStorageMetadata", "offsets", "sizes")
        chunk = ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))
        chunks.append(chunk)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            offset + length > whole for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise CheckpointError(f"a piece of {shown(name)} lies outside of it: do not trust it")
        if not (count := math.prod(chunk.sizes)):
            continue
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None or place.length < count * dtype.itemsize or chunk.offsets in begun:
            raise CheckpointError(f"a piece of {shown(name)} is not in its files: do not trust it")
        begun.add(chunk.offsets)
        covered += count
    if covered != math.prod(size):
        raise CheckpointError(f"the pieces of {shown(name)} do not cover it: do not trust it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(key: Any) -> MetadataIndex:
    found = _state(key, f"{METADATA}.MetadataIndex", "fqn")
    if type(found["fqn"]) is not str:
        _refuse("the name of a tensor")
    offset = found.get("offset")
    return MetadataIndex(found["fqn"], _size(offset) if offset is not None else None)


def _place(value: Any, sizes: Mapping[str, int]) -> StorageInfo:
    found = _state(value, STORAGE_INFO, "relative_path", "offset", "length")
    name, offset, length = found["relative_path"], found["offset"], found["length"]
    if type(name) is not str or not _is_number(offset) or not _is_number(length):
        _refuse("the place of a piece")
    if found.get("transform_descriptors"):
        raise CheckpointError("it has files that are compressed, and lpq.checkpoint.save writes none")
    if name not in sizes:
        raise CheckpointError(f"it refers to the file {name[:200]!r}, which the manifest does not list")
    if offset + length > sizes[name]:
        raise CheckpointError(f"it refers to what lies beyond the end of {name}")
    return StorageInfo(name, offset, length)


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"{what} is not as an index has it: do not trust it")


def _is(value: Any, name: str) -> TypeGuard[Record]:
    return isinstance(value, Record) and value.name == name


def _state(value: Any, name: str, *wanted: str) -> dict[str, Any]:
    """The fields of a record of this name, which must have those that are wanted."""
    if not _is(value, name) or value.args or type(value.state) is not dict or not value.state.keys() >= {*wanted}:
        raise CheckpointError(f"it has something else where an index has a {name.rpartition('.')[2]}: do not trust it")
    return value.state


def _entries(value: Any) -> ItemsView[Any, Any]:
    if type(value) is not dict:
        _refuse("a table")
    return value.items()


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < LIMIT


def _size(value: Any) -> torch.Size:
    if _is(value, "torch.Size"):
        numbers = value.args[0] if value.args else ()
        if (
            len(value.args) <= 1
            and type(numbers) is tuple
            and len(numbers) <= DIMENSIONS
            and all(map(_is_number, numbers))
        ):
            return torch.Size(numbers)
    _refuse("a size")


def _dtype(properties: Any) -> torch.dtype:
    if _is(properties, f"{METADATA}.TensorProperties") and type(properties.state) is tuple and properties.state:
        known = properties.state[0]
        if isinstance(known, type) and issubclass(known, Record):
            dtype = DTYPES.get(known.name.removeprefix("torch."))
            if dtype is not None:
                return dtype
    _refuse("a dtype")
