"""Launches and products that are called from C, which takes the host less time than from Python.

``csrc/host/calls.c`` is compiled by this machine's C compiler when it is first needed, and kept beside the compiled
kernels. Where there is no compiler, or Python's headers are missing, Python makes the same calls.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from lpq.kernels import trusted
from lpq.kernels.nvrtc_cache import cache_dir, csrc

NAME = "lpq_calls"
OPTIONS = ("-O2", "-shared", "-fPIC", "-std=c11")
SECONDS = 60
"""A compiler that takes longer is given up."""


def calls() -> Any | None:
    """The module with ``Launch`` and ``Product``; None where it cannot be made."""
    return _made()[0]


def why_not() -> str | None:
    """Why launches are made in Python; None if they are made in C."""
    return _made()[1]


def lacking() -> str | None:
    """Why it cannot be compiled here, as far as that is clear without compiling; None if nothing is missing."""
    if sys.implementation.name != "cpython" or os.name != "posix":
        return "they are written for CPython on systems like Linux"
    if _compiler() is None:
        return "there is no C compiler"
    headers = sysconfig.get_paths()["include"]
    return None if Path(headers, "Python.h").is_file() else f"Python's headers are not in {headers}"


def _compiler() -> str | None:
    found = (shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))
    return next((path for path in found if path), None)


@functools.cache
def _made() -> tuple[Any | None, str | None]:
    source, compiler, headers = csrc() / "host/calls.c", _compiler(), sysconfig.get_paths()["include"]
    why = lacking()
    if why is not None or compiler is None:
        return None, why
    how = (source.read_bytes(), sys.version, sysconfig.get_platform(), compiler, OPTIONS)
    name = f"{hashlib.sha256(repr(how).encode()).hexdigest()}.so"
    folder = cache_dir()
    try:
        if folder is None or trusted.fault(folder) is not None or not _writable(folder):
            with tempfile.TemporaryDirectory() as own:
                return _load(_compiled(compiler, headers, source, Path(own, name))), None
        place = folder / name
        if not place.is_file():
            _compiled(compiler, headers, source, place)
        trusted.read(place)
        return _load(place), None
    except (OSError, ImportError, subprocess.SubprocessError, trusted.Untrusted) as error:
        return None, f"{source.name} could not be compiled and loaded: {error}"


def _writable(folder: Path) -> bool:
    with suppress(OSError):
        trusted.make(folder)
    return os.access(folder, os.W_OK | os.X_OK)


def _compiled(compiler: str, headers: str, source: Path, place: Path) -> Path:
    """Compile to a file beside its place, and rename that, so that nobody loads half of it."""
    part = place.with_name(f"{uuid.uuid4().hex}.part")
    command = [compiler, *OPTIONS, f"-I{headers}", str(source), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}\n{done.stderr}")
        part.chmod(0o755)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    return place


def _load(place: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(place))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def address_of(function: Any) -> int | None:
    """Where a function of a library that ``ctypes`` loaded begins; None of anything else."""
    try:
        return ctypes.cast(function, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return None
