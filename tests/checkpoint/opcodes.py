"""Pickles put together by hand, opcode by opcode: what no honest program writes, and whoever attacks a reader does."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lpq.files.manifest import MANIFEST

NONE, EMPTY = b"N", b")"
END = b"."


def named(cls: Any) -> bytes:
    """A class or function, by its name."""
    return b"c" + f"{cls.__module__}\n{cls.__qualname__}\n".encode()


def value(data: Any) -> bytes:
    """Any honest value."""
    return pickle.dumps(data, 2)[2:-1]


def table(entries: Mapping[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + item for key, item in entries.items()) + b"u"


def fields(**entries: bytes) -> bytes:
    return table({value(name): item for name, item in entries.items()})


def made(cls: Any, state: bytes = b"") -> bytes:
    """An instance, made without its constructor, that gets a state."""
    return named(cls) + EMPTY + b"\x81" + (state + b"b" if state else b"")


def attributes(**entries: bytes) -> bytes:
    """The state that sets attributes, whatever they mean, where there is no ``__setstate__``."""
    return NONE + fields(**entries) + b"\x86"


def changed(target: Any, **entries: bytes) -> bytes:
    """Sets attributes of a class or function itself."""
    return named(target) + attributes(**entries) + b"b0"


class Evil:
    """A call that is made where this is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def saved_evil(marker: Path) -> bytes:
    """Return a file for which ``torch.load(…, weights_only=False)`` makes a call."""
    buffer = io.BytesIO()
    torch.save(Evil(Path.touch, marker), buffer)
    return buffer.getvalue()


def index_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def put(path: Path, name: str, raw: bytes) -> None:
    """Digests protect against accidents; whoever edits a file edits them, too."""
    (path / name).write_bytes(raw)
    listed(path, lambda found: {**found, name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}})


def listed(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what the manifest lists."""
    said = json.loads((path / MANIFEST).read_text())
    said["files"] = change(said["files"])
    (path / MANIFEST).write_text(json.dumps(said))


def as_version_1(path: Path) -> Path:
    """Make a checkpoint one that an lpq wrote which had DCP's index alone."""
    put(path, "lpq.json", json.dumps({**json.loads((path / "lpq.json").read_text()), "version": 1}).encode())
    (path / "index.json").unlink()
    listed(path, lambda found: {name: said for name, said in found.items() if name != "index.json"})
    return path


def two_faced(path: Path, marker: Path) -> bytes:
    """An index in which a tensor is one in the first reading, and bytes that run code in the second.

    The entry is made as one of bytes, and a state gives it the class of a tensor's. Then the class of bytes gets a
    ``__setstate__``, which is what the state of the entry goes to from then on.
    """
    index = index_of(path)
    (name, entry), *_ = index.state_dict_metadata.items()
    (key,) = (key for key in index.storage_data if key.fqn == name)
    evil = saved_evil(marker)
    file = index.storage_data[key].relative_path
    at = (path / file).stat().st_size
    put(path, file, (path / file).read_bytes() + evil)  # a file of the checkpoint, with all that it had
    tensor = {part: value(getattr(entry, part)) for part in ("properties", "size", "chunks")}
    disguised = made(
        metadata.BytesStorageMetadata, attributes(**tensor, __class__=named(metadata.TensorStorageMetadata))
    )
    storage = {value(k): value(v) for k, v in index.storage_data.items()}
    storage[value(metadata.MetadataIndex(name))] = value(filesystem._StorageInfo(file, at, len(evil)))
    tensors = {value(n): value(e) for n, e in index.state_dict_metadata.items()}
    tensors[value(name)] = disguised
    whole = fields(
        state_dict_metadata=table(tensors), storage_data=table(storage), planner_data=b"}", storage_meta=NONE,
        version=NONE,
    )  # fmt: skip
    return (
        b"\x80\x02" + made(metadata.Metadata, whole)
        + changed(metadata.BytesStorageMetadata, __setstate__=named(metadata.Metadata)) + END
    )  # fmt: skip
