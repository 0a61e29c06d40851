"""Compiled code on disk: the machine code of kernels, and the library that calls them from C.

A file of the cache is named after everything that its code depends on, and ends with a digest of the code. A damaged or
truncated file is compiled anew and never loaded: loading a truncated library would end the process by a signal. A file
is written beside its place, and is on the disk before it is renamed, so that processes which compile the same source at
once never read half of it. Where the cache (``LPQ_CACHE_DIR``, by default ``~/.cache/lpq``) cannot be written, or
others could write to it (``lpq.kernels.trusted``), each process compiles for itself and warns.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lpq.kernels import trusted
from lpq.registry.warning import warn

CACHE = "LPQ_CACHE_DIR"
DIGEST = hashlib.sha256
DIGEST_SIZE = DIGEST().digest_size


class KernelCacheWarning(UserWarning):
    """Compiled kernels cannot be kept."""


def compiled(name: str, compile: Callable[[], bytes]) -> tuple[bytes, Path | None]:
    """Return the code of this name, compiled if it is not cached, and its file, which ends with the code and its
    digest. The file is None where none can be kept.
    """
    folder = cache_dir()
    if folder is None:
        _cannot_keep("without a home folder")
    elif why := trusted.fault(folder):
        _cannot_keep(f"in {folder} ({why})")
    else:
        place = folder / name
        code = _read(place)
        if code is not None:
            return code, place
        code = compile()
        return code, place if _write(place, code) else None
    return compile(), None


def cache_dir() -> Path | None:
    """The folder of compiled kernels; None where no variable names one and this user has no home."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpq"
    except RuntimeError:  # no HOME, and no entry of this user in the system
        return None


def why_unkept() -> str | None:
    """Why compiled kernels cannot be kept here; None: they can. It makes no folder."""
    folder = cache_dir()
    if folder is None:
        return "this user has no home folder"
    try:
        nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    except OSError as error:  # as where a folder above it may not be entered
        return f"{folder} cannot be reached ({error.strerror or error})"
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return trusted.fault(folder) if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


def _read(place: Path) -> bytes | None:
    """The code in a file of the cache; None if there is none, if it is damaged, or if others can have written it."""
    try:
        content = trusted.read(place)
    except OSError:
        return None
    except trusted.Untrusted as why:
        _warn(f"a kernel that was kept is compiled anew: {why}, and code of others is not run.")
        return None
    code, digest = content[:-DIGEST_SIZE], content[-DIGEST_SIZE:]
    return code if code and DIGEST(code).digest() == digest else None


def _write(place: Path, code: bytes) -> bool:
    """Keep code in a file of the cache, if that can be done; a warning says why not."""
    written = place.with_name(f"{uuid.uuid4().hex}.part")
    try:
        trusted.make(place.parent)
        written.touch(0o644, exist_ok=False)  # other users may read it, if the umask lets them
        with written.open("wb") as file:
            file.write(code + DIGEST(code).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, place)
    except OSError as error:
        with suppress(OSError):
            written.unlink()
        _cannot_keep(f"in {place.parent} ({error.strerror or error})")
        return False
    return True


def _cannot_keep(why: str) -> None:
    _warn(
        f"compiled kernels cannot be kept {why}: every process compiles them again, a fraction of a second each. "
        f"Set {CACHE} to a folder that you can write, and nobody else."
    )


def _warn(what: str) -> None:
    warn(what, KernelCacheWarning)  # Python shows the same text from the same place once
