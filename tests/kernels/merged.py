"""Many CUDA sources, or one with many sets of macros, in one that nvcc compiles at once.

Each has a namespace of its own, and no macro of one is left for the next. To start nvcc, and what it reads before every
source, takes longer than most of ours do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lpq.kernels import nvrtc_cache

Macros = tuple[str, ...]
_DEFINED = re.compile(r"#define (\w+)")
_GLOBAL = re.compile(r"(?<![\w>])::(?=\w)")
"""Before a name of the outermost namespace, which is a set's own."""


def headers(folder: Path) -> Path:
    """Write csrc's files to a folder: headers that are read anew in each namespace, kernels that are named by it."""
    for source in nvrtc_cache.csrc().glob("**/*.cu*"):
        copy = folder / source.relative_to(nvrtc_cache.csrc())
        copy.parent.mkdir(parents=True, exist_ok=True)
        text, once = source.read_text(), f"ONCE_{source.parent.name}_{source.stem}"
        if "#pragma once" in text:
            text = text.replace("#pragma once", f"#ifndef {once}\n#define {once}") + "#endif\n"
        copy.write_text(_GLOBAL.sub("OUTERMOST::", text).replace('extern "C" __global__', "__global__"))
    return folder


def merged(sets: Iterable[tuple[Path, Macros]], folder: Path) -> str:
    """A source with all of these sources, each with its macros. ``folder``: where ``headers`` wrote to."""
    csrc = nvrtc_cache.csrc().resolve()
    names = sorted({name for path in folder.glob("**/*.cu*") for name in _DEFINED.findall(path.read_text())})
    parts = []
    for number, (source, macros) in enumerate(sets):
        own = [nvrtc_cache._macro(macro) for macro in macros]
        lines = [f"#define {name} {value}".replace(f'"{csrc}/', f'"{folder}/') for name, value in own]
        lines += [
            f"#define OUTERMOST set{number}",
            f"namespace set{number} {{",
            f'#include "{folder / source.resolve().relative_to(csrc)}"',
            "}",
        ]
        parts += [*lines, *(f"#undef {name}" for name in sorted({*names, "OUTERMOST", *(name for name, _ in own)}))]
    return "\n".join([*parts, ""])
