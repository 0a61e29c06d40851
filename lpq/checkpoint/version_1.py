"""The index of a checkpoint of version 1, which has DCP's own index (``.metadata``) alone.

It is a pickle, and whoever edits a pickle writes a program. So nothing that it names is looked up, called or changed:
it is read once, into records that hold its content, and the data that ``index.json`` would have is made of the records.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, ClassVar

from lpq.checkpoint.errors import CheckpointError, expect, tensor_name

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
    so = all(type(key) is str or isinstance(key, Record) for key in reader.stack[keys])
    expect(so, "the name of a tensor is not as an index has it")
    pickle._Unpickler.dispatch[code](reader)


def read(raw: bytes) -> dict[str, Any]:
    """The data of an ``index.json``, which must be judged as one, from these bytes. Any error is of a pickle of
    something else."""
    whole = _Unpickler(io.BytesIO(raw)).load().state
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for key, value in whole["storage_data"].items():
        name, at, place = key.state["fqn"], key.state.get("offset"), value.state
        expect(type(name) is str, "the name of a tensor is not as an index has it")
        if place.get("transform_descriptors"):
            raise CheckpointError("it has files that are compressed, and lpq.checkpoint.save writes none")
        where = name, tuple(_size(at)) if at is not None else ()
        expect(where not in places, f"it has a piece of {tensor_name(name)} twice")
        places[where] = {"file": place["relative_path"], "begin": place["offset"], "bytes": place["length"]}
    return {
        "tensors": {name: _tensor(name, entry.state, places) for name, entry in whole["state_dict_metadata"].items()}
    }


def _tensor(
    name: str, fields: dict[str, Any], places: dict[tuple[str, tuple[int, ...]], dict[str, Any]]
) -> dict[str, Any]:
    chunks = [piece.state for piece in fields["chunks"]]
    pieces = [{"at": _size(chunk["offsets"]), "shape": _size(chunk["sizes"])} for chunk in chunks]
    pieces = [{**piece, **places.get((name, (*piece["at"],)), {})} for piece in pieces if 0 not in piece["shape"]]
    expect(all("file" in piece for piece in pieces), f"a piece of {tensor_name(name)} is not in its files")
    dtype: str = fields["properties"].state[0].name
    return {"dtype": dtype.removeprefix("torch."), "shape": _size(fields["size"]), "pieces": pieces}


def _size(value: Record) -> list[int]:
    (numbers,) = value.args or ((),)
    expect(all(type(number) is int for number in numbers), "a size is not as an index has it")
    return [*numbers]
