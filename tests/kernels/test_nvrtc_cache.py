"""Compiled CUDA sources are kept in a cache, which survives what can happen to it."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lpq.kernels import KernelError, code_cache, nvrtc_cache
from lpq.kernels.code_cache import KernelCacheWarning


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "mine.cuh").write_text("#define ONE 1\n")
    (folder / "mine.cu").write_text('#include "mine.cuh"\n#include "numbers.cuh"\nextern "C" __global__ void f() {}\n')
    return folder / "mine.cu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, tuple[str, ...], str]]:
    """A compiler that writes down what it was asked for, and a cache of its own."""
    calls: list[tuple[str, tuple[str, ...], str]] = []

    def compile_source(source: Path, macros: tuple[str, ...], architecture: str) -> bytes:
        calls.append((source.name, macros, architecture))
        return f"code {len(calls)}".encode()

    monkeypatch.setattr(nvrtc_cache, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc_cache, "compiler_version", lambda: "13.0")
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path / "cache"))
    return calls


def kept() -> list[Path]:
    """The files of the cache."""
    folder = code_cache.cache_dir()
    assert folder is not None
    return list(folder.iterdir())


@pytest.fixture
def cubin(source: Path, compiled: list[object]) -> Callable[..., bytes]:
    """The code of the source, compiled or taken from the cache."""
    return lambda *macros: nvrtc_cache.cubin(source, macros, "sm_90a")


def test_what_the_code_depends_on_is_in_the_key(
    source: Path, compiled: list[object], cubin: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        cubin("A=1")
        cubin("A=1")
        return len(compiled)

    assert count() == 1
    assert [p.suffix for p in kept()] == [".cubin"]
    cubin("A=2")
    nvrtc_cache.cubin(source, ("A=1",), "sm_80")
    assert count() == 3
    source.with_name("mine.cuh").write_text("#define ONE 2\n")
    assert count() == 4, "a header that it includes has changed"
    source.write_text(source.read_text() + "\n")
    assert count() == 5
    monkeypatch.setattr(nvrtc_cache, "compiler_version", lambda: "13.1")
    assert count() == 6
    monkeypatch.setattr(nvrtc_cache, "OPTIONS", {**nvrtc_cache.OPTIONS, "fma": True})
    assert count() == 7


def test_a_header_of_lpq_belongs_to_the_key(
    source: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = shutil.copytree(nvrtc_cache.headers(), tmp_path / "common")
    monkeypatch.setattr(nvrtc_cache, "headers", lambda: common)
    before = nvrtc_cache.key(source, (), "sm_90a")
    header = common / "numbers.cuh"
    header.write_bytes(header.read_bytes() + b"\n")
    assert nvrtc_cache.key(source, (), "sm_90a") != before
    assert nvrtc_cache.key(source.rename(source.with_name("b.cu")), (), "sm_90a") != before


def test_the_keys_of_a_model_read_each_file_once(compiled: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many as a Llama block needs. A process has all of them in 10 ms, if the machine does nothing else."""
    csrc = nvrtc_cache.csrc()
    sides = [
        f'LPQ_{side}_HEADER="{csrc / "fp8" / name}.cuh"' for side in ("ROW", "COL") for name in ("lines", "matrix")
    ]
    wanted = [(csrc / "common" / "pair.cu", (side,)) for side in sides]
    wanted += [(path, macros) for path in sorted((csrc / "fp8").glob("*.cu")) for macros in ((), ("A=1",))]
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    times = []
    for _ in range(5):
        read.clear()
        nvrtc_cache._read.cache_clear()
        begin = time.process_time()
        keys = {nvrtc_cache.key(path, macros, "sm_90a") for path, macros in wanted}
        times.append(time.process_time() - begin)
        assert len(keys) == len(wanted) == 20
    headers = [path for path in read if path.suffix == ".cuh"]
    assert len({*headers}) == len(headers) > 10
    assert min(times) < 40e-3


def test_a_file_that_was_just_written_is_read_each_time(source: Path, compiled: list[object]) -> None:
    """Written twice between two ticks of the file system's clock, a file shows only its content."""
    header = source.with_name("mine.cuh")
    when = time.time_ns()
    keys = set()
    for number in range(20):
        header.write_text(f"#define ONE {number:02}\n")
        os.utime(header, ns=(when, when))
        keys.add(nvrtc_cache.key(source, (), "sm_90a"))
    assert len(keys) == 20


@pytest.mark.parametrize("damage", [b"", b"x", b"code 1", b"\0" * 40])
def test_a_damaged_file_is_compiled_anew(cubin: Callable[..., bytes], damage: bytes) -> None:
    cubin()
    (file,) = kept()
    file.write_bytes(damage)
    assert [cubin(), cubin()] == [b"code 2"] * 2


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


class FullWhileWritten(io.BytesIO):
    write = full


def opened_full(path: Path, mode: str) -> FullWhileWritten:
    path.touch()
    return FullWhileWritten()


@pytest.mark.parametrize(
    ("where", "name", "instead"), [(os, "replace", full), (Path, "open", opened_full)], ids=["renamed", "written"]
)
def test_a_disk_that_is_full_leaves_no_half_file(
    cubin: Callable[..., bytes], where: Any, name: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, instead)
        with pytest.warns(KernelCacheWarning, match="No space left"):
            assert cubin() == b"code 1"
    assert kept() == []
    assert cubin() == b"code 2"


def test_a_cache_that_can_only_be_read_is_read(cubin: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cubin() == b"code 1"
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if set(mode) & set("wxa+"):
            raise PermissionError(13, "Permission denied", str(path))  # what root, who may write anywhere, never sees
        return opened(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", read_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin() == b"code 1"
    with pytest.warns(KernelCacheWarning, match="Permission denied"):
        assert cubin("A=1") == b"code 2"
    assert len(kept()) == 1


def test_nobody_sees_a_file_that_is_half_written(cubin: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process writes, those beside it find no file of the name that they look for."""
    seen: list[list[str]] = []

    class Slow(io.FileIO):
        def write(self, content: Any) -> int:
            half = len(content) // 2
            super().write(content[:half])
            seen.append([path.suffix for path in kept()])
            return half + (super().write(content[half:]) or 0)

    monkeypatch.setattr(Path, "open", lambda path, mode: Slow(path, mode.replace("b", "")))
    assert cubin() == b"code 1"
    assert seen == [[".part"]]
    assert [path.suffix for path in kept()] == [".cubin"]


def test_a_file_is_on_the_disk_before_it_has_its_name(
    cubin: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the power fails in between there is no file, and not an empty one."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(f"{os.fstat(file).st_size} bytes"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("renamed"), replace(*names)))
    assert cubin() == b"code 1"
    assert done == [f"{len(b'code 1') + code_cache.DIGEST_SIZE} bytes", "renamed"]


@pytest.mark.parametrize("place", ["cache", "a file/cache"])
def test_a_cache_that_cannot_be_written_is_said_once(
    place: str, cubin: Callable[..., bytes], compiled: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / place.partition("/")[0]).write_text("not a folder")
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path / place))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for macros in ((), ("A=1",), ("A=2",)):
            cubin(*macros)
    assert len(compiled) == 3
    assert [(w.category, "LPQ_CACHE_DIR" in str(w.message)) for w in shown] == [(KernelCacheWarning, True)]


def test_many_writers_leave_a_whole_file(cubin: Callable[..., bytes]) -> None:
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        codes = list(pool.map(lambda _: cubin(), range(64)))
    (file,) = kept()
    assert all(code.startswith(b"code ") for code in codes)
    assert cubin() == file.read_bytes()[: -code_cache.DIGEST_SIZE]


def test_a_header_that_a_macro_names_belongs_to_the_key(
    source: Path, cubin: Callable[..., bytes], tmp_path: Path
) -> None:
    theirs = tmp_path / "elsewhere" / "theirs.cuh"
    theirs.parent.mkdir()
    theirs.write_text('#include "beside.cuh"\n')
    beside = theirs.with_name("beside.cuh")
    beside.write_text("")
    source.write_text("#include HEADER\n")
    macro = f'HEADER="{theirs}"'
    cubin(macro)
    beside.write_text("#define ONE 1\n")
    assert cubin(macro) == b"code 2"
    theirs.write_text("")
    assert cubin(macro) == b"code 3"


INCLUDES = [
    '#include "mine.cuh"', "#include <mine.cuh>", " # include\t<mine.cuh> // mine", '/**/ #include "mine.cuh"',
    '#include /**/ "mine.cuh"', '#/* two\nlines */include "mine.cuh"', '/* two\n// lines */ #include "mine.cuh"',
    '#\\\ninclude "mine.cuh"', '#include \\ \r\n"mi\\\nne.cuh"', '%:include "mine.cuh"',
    '// it\'s "\n#include "mine.cuh"', 'const char* of = "/*", c = \'"\', *more = R"(" /*)";\n#include "mine.cuh"',
    '#include "..//plugin/mine.cuh"', "#include <..//plugin/mine.cuh>",
    *(f"#define NAMED(name) <name.cuh>\n#define HEADER {by}\n#include HEADER"
      for by in ('"mine.cuh"', "<mine.cuh>", "NAMED(mine)")),
]  # fmt: skip


@pytest.mark.parametrize("include", INCLUDES)
def test_a_header_that_changes_is_compiled_anew(source: Path, cubin: Callable[..., bytes], include: str) -> None:
    source.write_text(f"{include}\n#include <cuda_fp16.h>\n")
    assert [cubin(), cubin()] == [b"code 1"] * 2
    source.with_name("mine.cuh").write_text("#define ONE 2\n")
    assert cubin() == b"code 2"


@pytest.mark.parametrize("name", ["below/mine.cuh", "../mine.cuh", "mine.txt", "{}/mine.cuh"])
@pytest.mark.parametrize("by", ["mine.cu", "mine.cuh"])
def test_a_header_that_is_not_in_the_key_is_refused(
    source: Path, name: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    name = name.format(tmp_path)
    header = source.parent / name
    header.parent.mkdir(exist_ok=True)
    header.write_text("")
    source.with_name(by).write_text(f'#include <cuda_fp16.h>\n # include "{name}"\n')
    with pytest.raises(KernelError, match=rf"{by} includes .*mine.* put it beside the source, ending in \.cu or"):
        nvrtc_cache.compile_source(source, (), "sm_90a")


def test_a_source_that_is_not_there_is_named(source: Path, compiled: list[object]) -> None:
    source.unlink()
    with pytest.raises(KernelError, match=rf"{source} cannot be read: No such file"):
        nvrtc_cache.cubin(source, (), "sm_90a")
    assert compiled == []


def no_library() -> None:
    raise RuntimeError("No such file: libnvrtc.so.13")


@pytest.mark.parametrize("bindings", [{}, {"nvrtc": types.SimpleNamespace(nvrtcVersion=no_library)}])
def test_without_nvrtc_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch, bindings: dict[str, object]) -> None:
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(**bindings))
    with pytest.raises(KernelError, match=r"NVRTC.*cannot be loaded.*pip install .*nvidia-cuda-nvrtc(?s:.*)nvrtc"):
        nvrtc_cache.compiler_version()


def test_a_source_is_compiled_beside_its_own_headers(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a bare name, NVRTC prefers the headers of the working directory."""
    asked: dict[str, object] = {}

    class Program:
        code = b"code"

        def __init__(self, text: str, language: str, options: dict[str, object]) -> None:
            asked.update(options)

        def compile(self, kind: str) -> Program:
            return self

    core = types.SimpleNamespace(Program=Program, ProgramOptions=dict)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.chdir(source.parent)
    nvrtc_cache.compile_source(Path(source.name), (), "sm_90a")
    assert asked["name"] == str(source)
    assert {**asked, **nvrtc_cache.OPTIONS} == asked


def test_a_user_without_a_home_is_told(
    source: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("LPQ_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(KernelCacheWarning, match=r"without a home folder.*LPQ_CACHE_DIR"):
        assert nvrtc_cache.cubin(source, (), "sm_90a") == b"code 1"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert nvrtc_cache.cubin(source, (), "sm_90a") == b"code 2"
    assert nvrtc_cache.cubin(source, (), "sm_90a") == b"code 2"
