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

from lpq.train.config import INSTALLED
from lpq.train.errors import TrainError

WORDS = {INSTALLED: "sources and documentation of the standard library and of installed packages"}
SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp", ".cu", ".html", ".js"})
"""The files of installed packages that are text: sources and documentation."""
PART = 20
"""A text is held out to this part: a twentieth."""
FILES = 2 * PART
"""From this number of different files on whole files are held out."""
# Beside a standard library often lie installed packages, and not every machine has its tests.
FOREIGN = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def standard_library() -> Iterator[Path]:
    """The sources of Python's standard library in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    for path in sorted((p for p in files if FOREIGN.isdisjoint(p.parts)), key=Path.as_posix):
        yield root / path


def installed() -> Iterator[Path]:
    """The standard library, then the text files of all installed packages, in a fixed order. lpq's own are left out:
    with another version of lpq a comparison goes on with the text that it began with."""
    yield from standard_library()
    others = (p for p in Path(sysconfig.get_path("purelib")).iterdir() if not p.name.startswith("lpq"))
    inside = (p for other in others for p in (other, *other.rglob("*")) if p.suffix in SUFFIXES and p.is_file())
    yield from sorted((p for p in inside if "__pycache__" not in p.parts), key=Path.as_posix)


def named_files(names: Sequence[str]) -> Iterator[Path]:
    """The files that ``names`` give: a file itself, or every file in a directory, in a fixed order."""
    for path in map(Path, names):
        if str(path) == INSTALLED:
            yield from installed()
        elif path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            yield from sorted(inside, key=Path.as_posix)
        elif path.is_file():
            yield path
        else:
            raise TrainError(f"data: {path} is neither a file nor a directory: name one that is there")


def read(files: Iterator[Path], most: int) -> dict[bytes, bytes]:
    """The different contents of ``files`` by their SHA-256, in order, up to ``most`` bytes together."""
    texts: dict[bytes, bytes] = {}
    size = 0
    for path in files:
        try:
            text = path.read_bytes()[: most - size]
        except OSError as error:
            raise TrainError(f"data: {path} cannot be read: {error.strerror or error}") from error
        if texts.setdefault(hashlib.sha256(text).digest(), text) is text:
            size += len(text)
        if size >= most:
            break
    return texts


def parted(texts: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """Split data into what is trained on and what is held out: whole files, chosen by their contents, and so the same
    ones wherever they lie; of few files the last part."""
    if len(texts) < FILES:
        raw = b"".join(texts.values())
        end = len(raw) - len(raw) // PART
        return raw[:end], raw[end:]
    ends = [[text for key, text in texts.items() if (int.from_bytes(key[:8]) % PART == 0) == part] for part in (0, 1)]
    return b"".join(ends[0]), b"".join(ends[1])


@dataclass(frozen=True)
class Text:
    """A text in two parts: what the model trains on, and about a twentieth, which measures its loss."""

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


def load(names: Sequence[str], length: int, mib: int = 16) -> Text:
    """The text of the files and directories ``names``, or of the standard library where none are given."""
    texts = read(named_files(names) if names else standard_library(), mib << 20)
    where = ", ".join(WORDS.get(name, name) for name in names) if names else "the sources of Python's standard library"
    train, held_out = parted(texts)
    if min(len(train), len(held_out)) <= length + 1:
        has, need = len(train) + len(held_out), PART * (length + 2)
        raise TrainError(f"data: {where} has {has} bytes; sequences of {length} need at least {need}")
    train_part, held_out_part = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    return Text(train_part, held_out_part, where, hashlib.sha256(b"".join(texts)).hexdigest())
