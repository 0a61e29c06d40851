"""CUDA kernels on a CPU: sources, compiled by g++ with a header that imitates the GPU, launched on a CPU's tensors.

It shows what a kernel computes: not how fast, and not all that can go wrong on a GPU. Each warp runs as far as it comes
without the others, the first of them first or the last, so that many a wait which is missing shows; so do copies that
are not waited for, pieces that are not aligned, and shared memory that was not asked for. Not seen are: a kernel that
does not wait for the one before, threads of one warp that wait in different places, what lies outside of a tensor, and
what GPUs before Hopper compute instead of its instructions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import platform
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import kept

from lpq import registry
from lpq.kernels import nvrtc_cache, tiles
from lpq.kernels.cuda import CudaKernel

HEADER = Path(__file__).with_name("cuda.h")
RUNS = HEADER.with_suffix(".cpp")
OPTIONS = ["-std=c++17", "-Og", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-frounding-math", "-fvisibility=hidden"]
Macros = tuple[str, ...]
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def in_place_of_launches(launch: Callable[..., None]) -> Iterator[None]:
    """``launch(kernel, device, macros, blocks, *arguments)`` is called where a kernel would be launched, bound or
    not."""

    def bind(self: CudaKernel, device: int, macros: Macros, blocks: int) -> Callable[..., None]:
        return lambda *arguments: launch(self, device, macros, blocks, *arguments)

    def now(self: CudaKernel, device: int, macros: Macros, blocks: int, *arguments: Any) -> None:
        launch(self, device, macros, blocks, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaKernel, "launch", now)
        patch.setattr(CudaKernel, "bind", bind)
        registry.refresh()  # what was bound launches otherwise
        yield
    registry.refresh()


MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles CUDA sources for a CPU"),
]
"""The marks of each file whose tests launch an imitated kernel."""
TURNS: dict[object, Iterator[bool]] = defaultdict(lambda: itertools.cycle((False, True)))
"""Whether the next launch of a kernel goes backwards; under ``...``, the launch of any kernel."""


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """Imitate launches, every second one of a kernel backwards, on a GPU of two multiprocessors; yield their names."""
    names: list[str] = []

    def run(self: CudaKernel, device: int, macros: Macros, blocks: int, *arguments: float) -> None:
        names.append(self.name)
        turns = TURNS[... if ... in TURNS else (self.source, macros, self.name)]
        launch(self, macros, blocks, arguments, backwards=next(turns))

    with pytest.MonkeyPatch.context() as patch, in_place_of_launches(run):
        patch.setattr(tiles, "multiprocessors", lambda device: 2)
        yield names


def _new_folder() -> Path:
    """It is there for as long as this process runs."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="lpq-imitated-"))
    return Path(_KEPT[-1].name)


@functools.cache
def compiled_header() -> Path:
    """The folder with the header that imitates the GPU, and what runs kernels."""
    to = _new_folder()
    shutil.copy(HEADER, to)
    _compile(["-x", "c++-header", str(to / HEADER.name)], to / f"{HEADER.name}.gch")
    _compile(["-c", "-O2", f"-I{to}", str(RUNS)], to / f"{RUNS.stem}.o")
    return to


@functools.cache
def folder() -> Path:
    """Where C++ is written to: with what csrc includes."""
    to = _new_folder()
    for source in nvrtc_cache.csrc().glob("**/*.cuh"):
        copy = to / source.relative_to(nvrtc_cache.csrc())
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(translated(source.read_text()))
    return to


@functools.cache
def _made_of(to: Path) -> str:
    """The compiler and the headers, of which any may be included. ``to``: the folder with csrc's."""
    headers = kept.tree(HEADER.parent), kept.tree(to)
    return f"{platform.machine()} {kept.version('g++')} {OPTIONS} {headers}"


def _compile(what: list[str], out: Path) -> None:
    done = subprocess.run(["g++", *OPTIONS, *what, "-o", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}:\n{done.stderr[:4000]}")


@functools.cache
def library(source: Path, macros: Macros, name: str) -> ctypes.CDLL:
    """A kernel of a source, compiled."""
    csrc, to, text = str(nvrtc_cache.csrc().resolve()), folder(), translated(source.read_text())
    defined = "".join("#define {} {}\n".format(*nvrtc_cache._macro(macro)) for macro in macros)
    named = kept.digest(map(Path, re.findall(r'"(/[^"]+)"', defined)))  # a macro may name a header, of a plugin too
    made_of = name, _made_of(to), text, defined.replace(csrc, ""), named
    _, place = kept.compiled(made_of, lambda: _compiled(source, text, defined.replace(csrc, str(to)), name, to))
    return ctypes.CDLL(str(place))


def _compiled(source: Path, text: str, defined: str, name: str, to: Path) -> bytes:
    places = (compiled_header(), to, to / "common", to / source.parent.name)
    with tempfile.TemporaryDirectory() as own:
        whole, out = Path(own) / f"{name}.cpp", Path(own) / f"{name}.so"
        # In a namespace without a name all is this file's own, so that shared memory can have a section of its own.
        whole.write_text(
            f'#include "{HEADER.name}"\n{defined}namespace {{\n{text}\n}}\n'
            'extern "C" __attribute__((visibility("default")))\n'
            "const char* launch_it(char* at, const int* to, unsigned blocks, int threads, int shared, int backwards) {"
            f" return imitated::launch(imitated::invoke<{name}>, at, to, blocks, threads, shared, backwards);\n}}\n"
        )
        _compile([*(f"-I{place}" for place in places), str(whole), str(places[0] / f"{RUNS.stem}.o")], out)
        return out.read_bytes()


def launch(kernel: CudaKernel, macros: Macros, blocks: int, arguments: tuple[float, ...], *, backwards: bool) -> None:
    """As ``CudaKernel.launch``, on a CPU's tensors."""
    if blocks == 0:
        return
    run = library(kernel.source.resolve(), macros, kernel.name).launch_it
    run.restype = ctypes.c_char_p
    packed = ctypes.create_string_buffer(kernel._slots.pack(*arguments), kernel._slots.size)
    places = (ctypes.c_int * len(kernel._places))(*kernel._places)
    wrong = run(packed, places, ctypes.c_uint(blocks), kernel.threads, kernel.shared, int(backwards))
    if wrong is not None:
        raise RuntimeError(f"{kernel.source.name}: {kernel.name} {macros}: {wrong.decode()}")


# ---------------------------------------------------------------------------------------------- from CUDA to C++


def translated(text: str) -> str:
    """A source with calls in place of its asm statements and of dynamic shared memory."""
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)imitated::dynamic;", text)
    out, at = [], 0
    for statement in re.finditer(r"\basm(?: volatile)?\(", text):
        end = _closing(text, statement.end())
        instruction, results, arguments = [*_split(text[statement.end() : end], ":"), "", ""][:3]
        given = ", ".join(f"imitated::bits_of({operand})" for operand in _operands(arguments))
        taken = "".join(f" imitated::set({operand}, out_[{i}]);" for i, operand in enumerate(_operands(results)))
        call = f"do {{ static imitated::Does* const does_ = imitated::instruction({instruction});"
        call += f" const uint64_t in_[8] = {{{given}}}; uint64_t out_[8]; does_(out_, in_);{taken} }} while (0)"
        out += [text[at : statement.start()], "" if instruction.strip() == '""' else call]
        at = end + 1
    return "".join([*out, text[at:]])


def _closing(text: str, start: int) -> int:
    """Where the bracket is closed that was opened before ``start``."""
    depth, quoted = 1, False
    for i in range(start, len(text)):
        if text[i] == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            if depth == 0:
                return i
    raise ValueError("an asm statement without an end")


def _split(text: str, by: str) -> Iterator[str]:
    """The parts between characters that stand neither in brackets nor in quotes."""
    depth, quoted, start = 0, False, 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == by and depth == 0:
                yield text[start:i]
                start = i + 1
    yield text[start:]


def _operands(text: str) -> Iterator[str]:
    """The expressions of ``"=r"(a), "f"(b)``."""
    for part in _split(text, ","):
        if "(" in part:
            yield part[part.index("(") + 1 : part.rindex(")")]
