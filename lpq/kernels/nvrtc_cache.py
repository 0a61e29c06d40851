"""Machine code from CUDA C++ sources: compiled at first use by NVRTC, then read from the cache (``code_cache``).

Its name there has everything that it depends on: the source and the headers that it includes, the macros, the options,
the architecture and the version of the compiler. A header is included by its name, or by a macro that comes with the
request; one that only a ``#define`` names is refused, for it could change unseen. ``cuda-core`` is imported when
something is compiled, not before.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from lpq.kernels import code_cache
from lpq.kernels.errors import KernelError

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
    """The cache's name for a compiled source. Sources share it if their texts, and those of their headers, are
    equal."""
    digest = code_cache.DIGEST(repr((OPTIONS, sorted(macros), architecture, compiler_version())).encode())
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
        for match in _directives(texts[path])[0]:
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
        for name in unknown.intersection(map(os.fsdecode, _directives(text)[1])):
            raise KernelError(
                f"{path} defines {name}, by which {source} includes a header: include it by its name, or hand {name} "
                f"over with the macros of the launch"
            )
    return texts


@functools.lru_cache(256)
def _directives(text: bytes) -> tuple[list[bytes], list[bytes]]:
    """Read the includes and the definitions of a source. Many sources share a header, which is searched once.

    Lines that go on are joined, and a comment is a space.
    """
    plain = COMMENT.sub(lambda found: found[1] or b" ", CONTINUED.sub(b"", text))
    return INCLUDE.findall(plain), DEFINE.findall(plain)


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
