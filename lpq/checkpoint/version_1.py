"""The index of a checkpoint of version 1, which has DCP's own index (``.metadata``) alone.

It is a pickle, and whoever edits a pickle writes a program. So nothing that it names is looked up, called or changed:
it is read once, into records that hold its content, and the data that ``index.json`` would have is made of the records.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import ItemsView
from typing import Any, ClassVar, TypeGuard

from lpq.checkpoint.errors import CheckpointError, expect, tensor_name
from lpq.torch_private.checkpoints import METADATA, STORAGE_INFO

OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip
"""The instructions that ``pickle.dump`` uses for an index. None of them takes more memory than it has bytes."""
NAMES = 100
"""More names than an index refers to: some twenty, and one for each dtype."""
CODES = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.name in OPCODES}


class Record:
    """The record of an object in the pickle: the arguments that would make it, and the state that it would get.

    There is one subclass for each name in a file, whatever it names, and for that file alone. A pickle can call or set
    nothing on it or on a record but these two methods; and called on the class, ``__setstate__`` lacks its ``self``.
    """

    __slots__ = ("args", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        """Keep the arguments."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

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
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        full = f"{module}.{name}"
        if full not in self._classes:
            expect(len(self._classes) < NAMES, f"it refers to {full[:200]!r}, and to more names than an index has")
            self._classes[full] = type("Record", (Record,), {"__slots__": (), "name": full})
        return self._classes[full]


def _set(reader: Any, code: int, keys: slice) -> None:
    """Set items whose keys are texts or records: the hash of a nested tuple may take for ever."""
    _like(all(type(key) is str or isinstance(key, Record) for key in reader.stack[keys]), "the name of a tensor")
    pickle._Unpickler.dispatch[code](reader)


def read(raw: bytes) -> dict[str, Any]:
    """The data of an ``index.json``, which must be judged as one, from these bytes."""
    whole = _state(_Unpickler(io.BytesIO(raw)).load(), f"{METADATA}.Metadata", "state_dict_metadata", "storage_data")
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for key, value in _entries(whole["storage_data"]):
        index = _state(key, f"{METADATA}.MetadataIndex", "fqn")
        place = _state(value, STORAGE_INFO, "relative_path", "offset", "length")
        name, at = index["fqn"], index.get("offset")
        _like(type(name) is str, "the name of a tensor")
        if place.get("transform_descriptors"):
            raise CheckpointError("it has files that are compressed, and lpq.checkpoint.save writes none")
        where = name, tuple(_size(at)) if at is not None else ()
        expect(where not in places, f"it has a piece of {tensor_name(name)} twice")
        places[where] = {"file": place["relative_path"], "begin": place["offset"], "bytes": place["length"]}
    return {"tensors": {name: _tensor(name, entry, places) for name, entry in _entries(whole["state_dict_metadata"])}}


def _tensor(name: Any, entry: Any, places: dict[tuple[str, tuple[int, ...]], dict[str, Any]]) -> dict[str, Any]:
    _like(type(name) is str, "the name of a tensor")
    if _is(entry, f"{METADATA}.BytesStorageMetadata"):
        raise CheckpointError(f"{tensor_name(name)} is no tensor, and lpq.checkpoint.save saves nothing else there")
    fields = _state(entry, f"{METADATA}.TensorStorageMetadata", "properties", "size", "chunks")
    _like(type(fields["chunks"]) is list, f"the pieces of {tensor_name(name)}")
    chunks = [_state(piece, f"{METADATA}.ChunkStorageMetadata", "offsets", "sizes") for piece in fields["chunks"]]
    pieces = [{"at": _size(chunk["offsets"]), "shape": _size(chunk["sizes"])} for chunk in chunks]
    pieces = [{**piece, **places.get((name, (*piece["at"],)), {})} for piece in pieces if 0 not in piece["shape"]]
    expect(all("file" in piece for piece in pieces), f"a piece of {tensor_name(name)} is not in its files")
    return {"dtype": _dtype(fields["properties"]), "shape": _size(fields["size"]), "pieces": pieces}


def _like(so: bool, what: str) -> None:
    expect(so, f"{what} is not as an index has it")


def _is(value: Any, name: str) -> TypeGuard[Record]:
    return isinstance(value, Record) and value.name == name


def _state(value: Any, name: str, *keys: str) -> dict[str, Any]:
    """The fields of a record of this name, which must include the wanted ones."""
    state = value.state if _is(value, name) and not value.args else None
    so = type(state) is dict and state.keys() >= {*keys}
    expect(so, f"it has something else where an index has a {name.rpartition('.')[2]}")
    return state or {}


def _entries(value: Any) -> ItemsView[Any, Any]:
    _like(type(value) is dict, "a table")
    items: ItemsView[Any, Any] = value.items()
    return items


def _size(value: Any) -> list[int]:
    numbers = ((*value.args, ())[0] if len(value.args) < 2 else None) if _is(value, "torch.Size") else None
    _like(type(numbers) is tuple and all(type(number) is int for number in numbers), "a size")
    return [*(numbers or ())]


def _dtype(properties: Any) -> str:
    state = properties.state if _is(properties, f"{METADATA}.TensorProperties") else None
    record = state[0] if type(state) is tuple and state else None
    _like(isinstance(record, type) and issubclass(record, Record), "a dtype")
    return str(getattr(record, "name", "")).removeprefix("torch.")
