"""Machine code from CUDA C++ sources: compiled at first use by NVRTC, then read from a cache on disk.

A file of the cache is named after everything that its code depends on: the source and the headers that it includes,
the macros, the options, the architecture and the version of the compiler. A header is included by its name, or by a
macro that comes with the request; one that only a ``#define`` names is refused, for it could change unseen. A file is
written beside its place and renamed, so that processes which compile the same source at once never read half a file,
and it begins with a digest, so that a damaged file is compiled anew. Where the cache cannot be written
(``LPQ_CACHE_DIR``, by default ``~/.cache/lpq``), or others could write to it (``lpq.kernels.trusted``), each process
compiles for itself, with a warning. ``cuda-core`` is imported when something is compiled, not before.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from lpq.kernels import trusted
from lpq.kernels.errors import KernelError
from lpq.registry.warning import warn

CACHE = "LPQ_CACHE_DIR"
OPTIONS = {"std": "c++17", "fma": False}
"""How every source is compiled. fp32 is IEEE's: no product is fused with a sum, nothing is flushed to zero."""
INCLUDE = re.compile(rb'^[ \t]*(?:#|%:)[ \t]*include[ \t]*("[^"\n]+"|<[^>\n]+>|\w+)', re.MULTILINE)
DEFINE = re.compile(rb"^[ \t]*(?:#|%:)[ \t]*define[ \t]+(\w+)", re.MULTILINE)
CONTINUED = re.compile(rb"\\[ \t]*\r?\n")
COMMENT = re.compile(
    rb"""(include[ \t]*<[^>\n]+>|R"([^()\\\s]{0,16})\(.*?\)\2"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    rb"""|/\*.*?\*/|//[^\n]*""",
    re.DOTALL,
)
"""An include or a literal, which may hold the signs of a comment, as the first group; or a comment."""
DIGEST = hashlib.sha256
DIGEST_SIZE = DIGEST().digest_size


class KernelCacheWarning(UserWarning):
    """Compiled kernels cannot be kept."""


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
    folder = cache_dir()
    if folder is None:
        _cannot_keep("without a home folder")
    elif why := trusted.fault(folder):
        _cannot_keep(f"in {folder} ({why})")
    else:
        code = _read(folder / name)
        if code is None:
            code = compile_source(source, macros, architecture)
            _write(folder / name, code)
        return code
    return compile_source(source, macros, architecture)


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


def key(source: Path, macros: tuple[str, ...], architecture: str) -> str:
    """The cache's name for a compiled source. Sources share it if their texts, and those of their headers, are
    equal."""
    digest = DIGEST(repr((OPTIONS, sorted(macros), architecture, compiler_version())).encode())
    for path, text in _with_includes(source, macros).items():
        digest.update(f"{path.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def _with_includes(source: Path, macros: tuple[str, ...]) -> dict[Path, bytes]:
    """The texts of a source, of every header that the compiler may find under a name that it includes, and of theirs.

    A name that is found nowhere is a header of the compiler's own.
    """
    handed = dict(map(_macro, macros))
    found, seen, unknown = [source], {source.resolve()}, set()
    texts = {}
    for path in found:  # grows while it is walked
        texts[path] = _text(path)
        for match in INCLUDE.findall(_directives(texts[path])):
            name = os.fsdecode(match)
            name = handed.get(name, name)
            if name[0] not in '"<':
                unknown.add(name)
                continue
            for folder in (path.parent, source.parent, headers()):
                header = folder / name[1:-1]
                if header.is_file() and header.resolve() not in seen:
                    seen.add(header.resolve())
                    found.append(header)
    for path, text in texts.items():
        for name in unknown.intersection(map(os.fsdecode, DEFINE.findall(_directives(text)))):
            raise KernelError(
                f"{path} defines {name}, by which {source} includes a header: include it by its name, or hand {name} "
                f"over with the macros of the launch"
            )
    return texts


def _directives(text: bytes) -> bytes:
    """A source as its directives are read: lines that go on are joined, and a comment is a space."""
    return COMMENT.sub(lambda found: found[1] or b" ", CONTINUED.sub(b"", text))


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


def _read(place: Path) -> bytes | None:
    """The code in a file of the cache; None if there is none, if it is damaged, or if others can have written it."""
    try:
        content = trusted.read(place)
    except OSError:
        return None
    except trusted.Untrusted as why:
        _warn(f"a kernel that was kept is compiled anew: {why}, and code of others is not run.")
        return None
    digest, code = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
    return code if code and DIGEST(code).digest() == digest else None


def _write(place: Path, code: bytes) -> None:
    written = place.with_name(f"{uuid.uuid4().hex}.part")
    try:
        trusted.make(place.parent)
        written.touch(0o644, exist_ok=False)  # other users may read it, if the umask lets them
        with written.open("wb") as file:
            file.write(DIGEST(code).digest() + code)
        os.replace(written, place)
    except OSError as error:
        with suppress(OSError):
            written.unlink()
        _cannot_keep(f"in {place.parent} ({error.strerror or error})")


def _cannot_keep(why: str) -> None:
    _warn(
        f"compiled kernels cannot be kept {why}: every process compiles them again, a fraction of a second each. "
        f"Set {CACHE} to a folder that you can write, and nobody else."
    )


def _warn(what: str) -> None:
    warn(what, KernelCacheWarning)  # Python shows the same text from the same place once
