"""Text as bytes, and batches of it that are a pure function of (seed, step).

The default text is on every machine: the sources of Python's standard library. Because no batch depends on an
earlier one, a resumed run reads exactly what the uninterrupted one would have read.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lpq.train.errors import TrainError

CAP = 16 << 20
"""The most bytes of text that are read."""

# Beside a standard library often lie installed packages, and not every machine has its tests.
FOREIGN = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def standard_library() -> Iterator[Path]:
    """The sources of Python's standard library in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    for path in sorted((p for p in files if FOREIGN.isdisjoint(p.parts)), key=Path.as_posix):
        yield root / path


def named_files(names: Sequence[str]) -> Iterator[Path]:
    """The files that ``names`` give: a file itself, or every file in a directory, in a fixed order."""
    for path in map(Path, names):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            yield from sorted(inside, key=Path.as_posix)
        elif path.is_file():
            yield path
        else:
            raise TrainError(f"data: {path} is neither a file nor a directory")


def read(files: Iterator[Path], cap: int = CAP) -> bytes:
    """The contents of ``files``, one after the other, up to ``cap`` bytes."""
    text = bytearray()
    for path in files:
        try:
            text += path.read_bytes()
        except OSError as error:
            raise TrainError(f"data: {path} cannot be read: {error.strerror or error}") from error
        if len(text) >= cap:
            break
    return bytes(text[:cap])


@dataclass(frozen=True)
class Text:
    """A text in two parts: what the model trains on, and the last twentieth, which measures its loss."""

    train: Tensor
    held_out: Tensor
    source: str
    """The origin of the text, in words."""
    digest: str
    """SHA-256 of the whole, by which a resumed run checks its text."""

    def batch(self, seed: int, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """The tokens ``[size, length]`` of one step, and the bytes that follow each."""
        return _cut(self.train, f"{seed}/{step}", size, length)

    def held_out_batch(self, index: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """A batch of the held-out part, which is the same for every seed, so that runs can be compared."""
        return _cut(self.held_out, f"held out/{index}", size, length)


def _cut(text: Tensor, key: str, size: int, length: int) -> tuple[Tensor, Tensor]:
    draw = random.Random(key)  # seeded by the string itself: neighbouring steps and seeds have nothing in common
    starts = [draw.randrange(len(text) - length) for _ in range(size)]
    rows = torch.stack([text[s : s + length + 1] for s in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def load(names: Sequence[str], length: int) -> Text:
    """The text of the files and directories ``names``, or of the standard library where none are given."""
    raw = read(named_files(names) if names else standard_library())
    where = ", ".join(names) if names else "the sources of Python's standard library"
    split = len(raw) - len(raw) // 20
    if len(raw) - split <= length + 1:
        need = 20 * (length + 2)
        raise TrainError(f"data: {where} has {len(raw)} bytes; sequences of {length} need at least {need}")
    everything = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Text(everything[:split], everything[split:], where, hashlib.sha256(raw).hexdigest())
