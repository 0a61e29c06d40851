"""Files of ``torch.save``, read without trust: tensors and plain data, whose checksums are compared.

``torch.load`` does not compare the checksums that ``torch.save`` writes, inflates what is compressed, and advises to
load unsafely what it refuses. Each error here is in words, and none passes that on.
"""

from __future__ import annotations

import zipfile
from mmap import mmap
from pathlib import Path
from typing import IO, Any, cast

import torch

from lpq.checkpoint.errors import CheckpointError
from lpq.registry.errors import LpqError

UNREADABLE = "it is damaged, or torch.save did not write it"
ALL = slice(None)


def load(path: Path, *, share: slice = ALL, mmap: bool = False) -> Any:
    """Return what was saved, on the CPU. ``share``: the records whose checksums this rank compares."""
    if path.is_dir():
        raise CheckpointError("it is a directory")
    try:
        with path.open("rb") as file:
            check_archive(file, path.stat().st_size)
            _check_sums(file, share)
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
        ) from error


def check_archive(file: IO[bytes] | mmap, size: int) -> None:
    """Refuse a file, of this size, whose records take more memory than it has bytes."""
    try:
        with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(UNREADABLE) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError("it has records that are compressed, which torch.save does not write: do not trust it")
    if sum(record.file_size for record in records) > size:
        raise CheckpointError("its records overlap: do not trust it")


def _check_sums(file: IO[bytes], share: slice) -> None:
    """Compare checksums. One of 0 is none: ``torch.serialization.set_crc32_options(False)``."""
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist()[share]:
                if record.CRC:
                    with archive.open(record) as content:
                        while content.read(1 << 24):
                            pass
    except Exception as error:  # a damaged archive raises many
        raise CheckpointError(f"it is damaged or was changed since it was saved ({type(error).__name__})") from error
