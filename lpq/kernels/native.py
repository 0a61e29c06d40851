"""Launches and products that are called from C, which takes the host less time than from Python.

``csrc/host/calls.c`` is compiled by this machine's C compiler when it is first needed, and kept beside the compiled
kernels. Where there is no compiler, or Python's headers are missing, Python makes the same calls.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from lpq.kernels import code_cache
from lpq.kernels.nvrtc_cache import csrc

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
    python = sys.version, sysconfig.get_platform(), sysconfig.get_config_var("SOABI")  # a debug build has its own
    name = f"{code_cache.DIGEST(repr((source.read_bytes(), *python, compiler, OPTIONS)).encode()).hexdigest()}.so"
    try:
        code, place = code_cache.compiled(name, lambda: _compiled(compiler, headers, source))
        if place is not None:
            return _load(place), None
        with tempfile.TemporaryDirectory() as own:
            place = Path(own, name)
            place.write_bytes(code)
            return _load(place), None
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return None, f"{source.name} could not be compiled and loaded: {error}"


def _compiled(compiler: str, headers: str, source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as own:
        out = Path(own, "out")
        command = [compiler, *OPTIONS, f"-I{headers}", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}\n{done.stderr}")
        return out.read_bytes()


def _load(place: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(place))
    spec = importlib.machinery.ModuleSpec(NAME, loader, origin=str(place))
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def address_of(function: Any) -> int | None:
    """Where a function of a library that ``ctypes`` loaded begins; None of anything else."""
    try:
        return ctypes.cast(function, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return None
