"""Machine code from CUDA C++ sources: compiled at first use by NVRTC, then read from the cache (``code_cache``).

The name in the cache depends on everything that the code depends on: the source, all sources and headers of the folders
from which it may include, the macros, the options, the architecture and the version of the compiler. These folders are
the source's own, ``csrc/common``, and the folder of a header that a macro of the request names. A header elsewhere is
refused, for it could change unseen. ``cuda-core`` is imported when something is compiled, not before.
"""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path

from lpq.kernels import code_cache
from lpq.kernels.code_cache import KernelCacheWarning as KernelCacheWarning  # its place until it moved
from lpq.kernels.errors import KernelError

OPTIONS = {"std": "c++17", "fma": False}
"""How every source is compiled. fp32 is IEEE's: no product is fused with a sum, nothing is flushed to zero."""
SOURCES = (".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inl", ".inc")
"""The endings of the files that a source may include. The rest of its folder may be anything."""
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
SETTLED = 2 * 10**9
"""The age, in nanoseconds, from which on a file that is written again gets another time: the clocks of files tick
slowly."""


@functools.cache
def csrc() -> Path:
    """The folder of lpq's own CUDA sources: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def headers() -> Path:
    """The folder of the headers that any source may include, a third party's too."""
    return csrc() / "common"


def cubin(source: Path, macros: tuple[str, ...], architecture: str) -> bytes:
    """The machine code of a source for an architecture such as ``sm_90a``; a macro is ``NAME=VALUE``."""
    name = f"{key(source, macros, architecture)}.cubin"
    code, _ = code_cache.compiled(name, lambda: compile_source(source, macros, architecture))
    return code


def key(source: Path, macros: tuple[str, ...], architecture: str) -> str:
    """The cache's name for a compiled source: the same wherever its folders lie."""
    digest = code_cache.DIGEST(repr((OPTIONS, sorted(macros), architecture, compiler_version(), source.name)).encode())
    digest.update(_text(source))
    for folder in _folders(source, macros):
        digest.update(_digest(folder))
    return digest.hexdigest()


def _folders(source: Path, macros: tuple[str, ...]) -> list[Path]:
    """The folders from which a source may include; every source and header in them belongs to the key."""
    named = (source.parent / value[1:-1] for _, value in map(_macro, macros) if value[0] in '"<')
    folders = [source.parent, headers(), *(header.parent for header in named if header.is_file())]
    return [*dict.fromkeys(folder.resolve() for folder in folders)]


def _sources(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if e.name.endswith(SOURCES) and e.is_file()), key=lambda e: e.name)


def _digest(folder: Path) -> bytes:
    """The digest of the sources and headers of a folder, which are read again only if a file was written."""
    found = [(entry.path, entry.stat()) for entry in _sources(folder)]
    seen = tuple((path, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in found)
    settled = all(time.time_ns() - max(s.st_mtime_ns, s.st_ctime_ns) > SETTLED for _, s in found)
    return (_read if settled else _read.__wrapped__)(seen)


@functools.lru_cache(64)
def _read(seen: tuple[tuple[str, int, int, int, int], ...]) -> bytes:
    digest = code_cache.DIGEST()
    for path, *_ in seen:
        text = _text(Path(path))
        digest.update(f"{os.path.basename(path)}\0{len(text)}\0".encode() + text)
    return digest.digest()


def _check_includes(source: Path, macros: tuple[str, ...]) -> None:
    """Refuse a header that is not in the key."""
    folders = _folders(source, macros)
    for path in (Path(entry.path) for folder in folders for entry in _sources(folder)):
        for name in map(os.fsdecode, INCLUDE.findall(_text(path))):
            header = next((h for folder in (path.parent, *folders) if (h := folder / name).is_file()), None)
            if header and not (header.parent.resolve() in folders and name.endswith(SOURCES)):
                raise KernelError(
                    f"{path} includes {header}, whose changes would go unnoticed: put it beside the source, ending in "
                    f"{' or '.join(SOURCES)}, or name it by a macro of the launch"
                )


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KernelError(f"the CUDA source {path} cannot be read: {error.strerror or error}") from error


def compiler_version() -> str:
    """The version of NVRTC."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # there are no bindings, or they find no libnvrtc
        raise KernelError(
            "NVRTC, which compiles the CUDA kernels, cannot be loaded. Install it: "
            f'pip install "lpq[cuda]" nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)\n{error}'
        ) from error
    return f"{major}.{minor}"


def compiles_for(capability: int) -> bool:
    """Whether NVRTC compiles for GPUs of a compute capability, as ``90`` for 9.0."""
    from cuda.bindings import nvrtc

    _, known = nvrtc.nvrtcGetSupportedArchs()
    return capability in known


def compile_source(source: Path, macros: tuple[str, ...], architecture: str) -> bytes:
    """Compile a source."""
    _check_includes(source, macros)
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=str(source.absolute()),  # a bare name makes NVRTC prefer the headers of the working directory
        arch=architecture,
        include_path=[str(source.parent), str(headers())],
        define_macro=[_macro(m) for m in macros] or None,
        **OPTIONS,
    )
    try:
        return bytes(Program(source.read_text("utf-8"), "c++", options).compile("cubin").code)
    except Exception as error:  # of a type that differs between the versions of cuda-core
        raise KernelError(f"{source} does not compile for {architecture} with {list(macros)}:\n{error}") from error


def _macro(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value or "1"
