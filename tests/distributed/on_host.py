"""CUDA kernels for fragments on the host: their very sources, compiled by a C++ compiler, thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lpq.ops.cubins import headers
from lpq.ops.cuda import CudaKernel

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent


class HostKernel:
    """In place of a ``CudaKernel`` with its arguments: a table and how many rows it has."""

    def __init__(self, kernel: CudaKernel, folder: Path, launches: list[str]) -> None:
        self.name, self.source, self.folder, self.launches = kernel.name, Path(kernel.source), folder, launches

    def launch(self, device: int, macros: tuple[str, ...], blocks: int, table: int, count: int) -> None:
        self.launches.append(self.name)
        if blocks:
            loaded(self.source, macros, self.folder)(self.name)(blocks, table, count)


def loaded(source: Path, macros: tuple[str, ...], folder: Path) -> Callable[[str], Any]:
    """The functions of a source that is compiled with these macros."""
    stem = "-".join([source.parent.name, source.stem, *(macro.replace("=", "") for macro in macros)])
    library = folder / f"{stem}.so"
    if not library.exists():
        names = ("tell", "turn") if source.stem == "fragments" else ("measure", "scales", "codes")
        calls = "".join(
            f'extern "C" void run_{name}(int64_t blocks, const void* table, int64_t count) {{'
            f" run([=] {{ {name}((const {_entry(name)}*)table, count); }}, blocks); }}\n"
            for name in names
        )
        main = folder / f"{stem}.cpp"
        main.write_text(f'#include "host.h"\n#include "{source}"\n{calls}')
        command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        command += [f"-I{folder}" for folder in (HERE, headers(), source.parent)] + [f"-D{m}" for m in macros]
        done = subprocess.run([*map(str, command), "-o", str(library), str(main)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return _functions(ctypes.CDLL(str(library)))


def _entry(name: str) -> str:
    return {"tell": "Told", "turn": "Turned"}.get(name, "Fragment")


def _functions(library: ctypes.CDLL) -> Callable[[str], Any]:
    def function(name: str) -> Any:
        found = getattr(library, f"run_{name}")
        found.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        return found

    return function
