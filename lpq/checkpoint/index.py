"""The index of a checkpoint: which tensors it has, and where in which file each piece of them lies.

lpq reads it from ``index.json``. DCP's own index, a pickle of the same content, is written for other programs. It is
read only where an earlier lpq wrote no other (``version_1``). Nothing in an index is trusted before it is compared with
the files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from lpq.checkpoint import version_1
from lpq.checkpoint.description import check_fields
from lpq.checkpoint.errors import TRUST, CheckpointError, expect, tensor_name
from lpq.files.disk import json_of
from lpq.files.manifest import INDEX, PICKLE
from lpq.torch_private.checkpoints import StorageInfo

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""The dtypes by name. A name is not looked up in ``torch``, which imports much for some."""
TENSOR: dict[str, tuple[type, ...]] = {"dtype": (str,), "shape": (list,), "pieces": (list,)}
"""The type of each field that describes a tensor."""
PIECE: dict[str, tuple[type, ...]] = {"at": (list,), "shape": (list,), "file": (str,), "begin": (int,), "bytes": (int,)}
"""The type of each field that describes a piece of a tensor: its place there, and its bytes in a file."""


def as_json(metadata: Metadata, results: Iterable[WriteResult]) -> bytes:
    """The index of what ranks have written."""
    places = {result.index: result.storage_data for result in results}
    tensors = {
        name: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": entry.size,
            "pieces": [
                {"at": c.offsets, "shape": c.sizes, "file": p.relative_path, "begin": p.offset, "bytes": p.length}
                for c in entry.chunks
                if 0 not in c.sizes and (p := places[MetadataIndex(name, c.offsets)])
            ],
        }
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def read_index(path: Path, sizes: Mapping[str, int]) -> Metadata:
    """Read the index of the checkpoint in this directory. ``sizes``: the sizes of its files, by its manifest.

    Each tensor is covered by its pieces, and each piece lies in one of the files.
    """
    name = INDEX if INDEX in sizes else PICKLE
    try:
        raw = (path / name).read_bytes()
        data = json_of(raw) if name == INDEX else version_1.read(raw)
        check_fields("it", data, {"tensors": (dict,)}, TRUST)
        places: dict[MetadataIndex, StorageInfo] = {}
        tensors = {name: _tensor(name, entry, places, sizes) for name, entry in data["tensors"].items()}
        filled = Counter[str]()
        for place in places.values():
            filled[place.relative_path] += place.length
        for file, length in filled.items():
            expect(length <= sizes[file], f"its pieces have more bytes than {file}, in which they lie")
    except CheckpointError as error:
        raise CheckpointError(f"its index ({name}) is refused: {error}") from error
    except OSError:
        raise
    except Exception as error:  # a file that is no pickle may raise anything
        why = f"{type(error).__name__}: {error}" if name == INDEX else type(error).__name__
        raise CheckpointError(f"its index ({name}) is refused: it is no index of tensors ({why}); {TRUST}") from error
    return Metadata(state_dict_metadata={**tensors}, storage_data=places)


def _tensor(
    name: str, entry: Any, places: dict[MetadataIndex, StorageInfo], sizes: Mapping[str, int]
) -> TensorStorageMetadata:
    """Describe a tensor as DCP does, and add the places of its pieces."""
    check_fields(f"its entry of {tensor_name(name)}", entry, TENSOR, TRUST)
    expect(entry["dtype"] in DTYPES, f"the dtype of {tensor_name(name)} is none")
    dtype, size = DTYPES[entry["dtype"]], _size(entry["shape"])
    chunks, covered, what = [], 0, f"a piece of {tensor_name(name)}"
    for piece in entry["pieces"]:
        check_fields(what, piece, PIECE, TRUST)
        at, shape, file = _size(piece["at"]), _size(piece["shape"]), piece["file"]
        begin, length = _size([piece["begin"], piece["bytes"]])
        index, count = MetadataIndex(name, at), math.prod(shape)
        inside = all(a + n <= whole for a, n, whole in zip(at, shape, size, strict=False))
        expect(len(at) == len(shape) == len(size) and inside, f"{what} lies outside of it")
        expect(file in sizes, f"{what} is in the file {file[:200]!r}, which the manifest does not list")
        expect(begin + length <= sizes.get(file, 0), f"{what} lies beyond the end of {file[:200]}")
        expect(length >= count * dtype.itemsize, f"{what} is not in its files")
        expect(index not in places, f"{what} is there twice")
        places[index] = StorageInfo(file, begin, length)
        chunks.append(ChunkStorageMetadata(at, shape))
        covered += count
    expect(covered == math.prod(size), f"the pieces of {tensor_name(name)} do not cover it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _size(numbers: list[Any]) -> torch.Size:
    expect(all(type(n) is int and n >= 0 for n in numbers), "a size or a place is not as an index has it")
    return torch.Size(numbers)
