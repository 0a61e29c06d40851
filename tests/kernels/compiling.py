"""nvcc, started as NVRTC compiles a source on a user's machine; what it compiled once is kept (``support.kept``)."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support import kept

from lpq.kernels import nvrtc_cache

LEAN = Path(__file__).with_name("nvcc")
"""A header in place of CUDA's own, which takes nvcc longer than most sources do. It declares what sources use of it."""
Macros = tuple[str, ...]


@functools.cache
def in_haste() -> list[str]:
    """Fewer optimizations, if this nvcc can do with fewer: all that is asked is whether it compiles."""
    told = subprocess.run(["nvcc", "--help"], capture_output=True, text=True).stdout
    return ["-Ofc=mid"] if "(-Ofc)" in told else []


class NvccError(Exception):
    """What nvcc says of a source that it does not compile."""


def run_nvcc(
    source: Path, macros: Macros, architecture: str, out: Path, *options: str, places: Sequence[Path] = ()
) -> str:
    """Compile a source as NVRTC does, or take what the same was compiled to before, and return what nvcc said of it.

    ``places``: of headers, in folders beside other sources.
    """
    defined = "".join("#define {} {}\n".format(*nvrtc_cache._macro(macro)) for macro in macros)  # -D ends at a comma
    text, all_places = f'{defined}#include "{source}"\n', [*places, nvrtc_cache.headers()]
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-fmad=false", "-std=c++17", *options]

    def compile() -> bytes:
        whole = out.with_suffix(".cu")
        whole.write_text(text)
        where = [*(f"-I{place}" for place in all_places), "-o", str(out), str(whole)]
        done = subprocess.run([*command, *where], capture_output=True, text=True)
        if done.returncode:
            raise NvccError(done.stdout + done.stderr)
        return done.stderr.encode() + b"\0" + out.read_bytes()

    folders = [place.parent for place in all_places]
    texts = text + source.read_text()
    for folder in (source.parent, *folders):
        texts = texts.replace(str(folder), "")
    made_of = kept.version("nvcc"), command, texts, [kept.tree(folder) for folder in folders]
    words, _, cubin = kept.compiled(made_of, compile)[0].partition(b"\0")
    out.write_bytes(cubin)
    return words.decode()


def by_nvcc(
    source: Path, macros: Macros, architecture: str, out: Path, headers: Sequence[Path] = (LEAN,),
    places: Sequence[Path] = (),
) -> str | None:  # fmt: skip
    """Return the compiler's errors, or None. ``headers``: in place of CUDA's own; ``places``: of headers, first."""
    try:
        run_nvcc(source, macros, architecture, out, *in_haste(), places=[*places, *headers])
    except NvccError as error:
        return str(error)
    return None
