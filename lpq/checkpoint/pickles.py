"""Files of ``torch.save``, read without trust: tensors and plain data, whose checksums are compared.

``torch.load`` does not compare the checksums that ``torch.save`` writes, decompresses records without a limit, and
advises to load unsafely a file that it refuses. Each error here is in words, and none passes on that advice.
"""

from __future__ import annotations

import pickletools
import zipfile
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, cast

import torch

from lpq.checkpoint.errors import CheckpointError, expect
from lpq.registry.errors import LpqError

UNREADABLE = "it is damaged, or torch.save did not write it"
CHANGED = "it is damaged or was changed since it was saved"
ALL, NOTHING = slice(None), slice(0)
PUTS, GETS = ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
NONE = (0, 0)
MOST, DEEPEST = 1_000_000, 100
"""The most tuples in a tuple, and the greatest depth."""


def load(path: Path, *, share: slice = ALL, mmap: bool = False) -> Any:
    """Return the content of the file, on the CPU. ``share``: the records whose checksums this rank compares."""
    if path.is_dir():
        raise CheckpointError("it is a directory")
    try:
        with path.open("rb") as file:
            check_archive(file, path.stat().st_size, share)
            file.seek(0)
            return torch.load(path if mmap else file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
    except (LpqError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"it is damaged, or holds something else than tensors and plain data ({type(error).__name__}): do not "
            "trust it"
        ) from None  # a traceback would show torch's advice


def check_archive(file: IO[bytes] | RawIOBase, size: int, share: slice = NOTHING) -> None:
    """Refuse a file of this size whose content takes more memory or time than its bytes account for. Compare the
    checksums of the records in ``share``; one of 0 is none: ``torch.serialization.set_crc32_options(False)``."""
    try:
        archive = zipfile.ZipFile(cast("IO[bytes]", file))
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(UNREADABLE) from error
    records = archive.infolist()
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    expect(stored, "it has records that are compressed, which torch.save does not write")
    expect(sum(record.file_size for record in records) <= size, "its records overlap")
    try:
        for record in records[share]:
            if record.CRC:
                with archive.open(record) as content:
                    while content.read(1 << 24):
                        pass
        for record in records:
            if record.filename.endswith("data.pkl"):
                if not record.CRC:
                    del record.CRC  # or reading would compare it
                _check_tuples(archive.read(record))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive raises many
        raise CheckpointError(f"{CHANGED} ({type(error).__name__})") from error


def _check_tuples(program: bytes) -> None:
    """Refuse a pickle with tuples that hold each other so often, or so deep, that their hash would never end."""
    stack: list[tuple[int, int]] = []  # for each object the tuples in it, with repetitions, and how deep they are
    marks: list[int] = []
    memo: dict[object, tuple[int, int]] = {}
    for op, argument, _ in pickletools.genops(program):
        if op.name in PUTS:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif op.name in GETS:
            stack.append(memo[argument])
        elif op.name == "MARK":
            marks.append(len(stack))
        else:
            marked = pickletools.markobject in op.stack_before
            begin = marks.pop() if marked else len(stack) - len(op.stack_before)
            inner = stack[begin:]
            del stack[begin - (op.stack_before.index(pickletools.markobject) if marked else 0) :]
            if op.name in TUPLES:
                nesting = 1 + sum(count for count, _ in inner), 1 + max((deep for _, deep in inner), default=0)
                expect(nesting[0] <= MOST and nesting[1] <= DEEPEST, "it has tuples in tuples without end")
                stack.append(nesting)
            else:
                stack += [NONE] * len(op.stack_after)
