"""Every snippet of README.md and of the documentation runs; what does not run says why."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forking
import pytest
import torch
from snippets import KNOWN, NOTEBOOKS, PAGES, ROOT, Block, blocks
from support.plugins import imported_from
from torchrun import run_forked

import lpq
from lpq import operations, registry
from lpq.__main__ import main
from lpq.cli.new_plugin import rendered
from lpq.kernels import choose
from lpq.registry.loader import HERE

NEEDED = {
    "huggingface.md": ("transformers", "accelerate", "peft", "safetensors"),
    "lightning.md": ("lightning",),
    "other-loops.md": ("trl",),
    "integrations.md": ("transformers", "safetensors"),
}
"""Packages that a page is about and lpq does not need; without them the page is skipped."""
CHECKED_AS = {"residual": "residual(base=nvfp4, rest=mxfp8)"}
"""The options with which a format is checked, if some of them have no default."""
IN_A_PROCESS = {"check"}
"""Commands that run in a process that is forked, since they run pytest; the others run here: it is faster."""


class Reader:
    """Somebody who follows a page from top to bottom in an empty folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.site = folder / "work", folder / "site"
        self.folder.mkdir()
        self.site.mkdir()
        self.namespace: dict[str, object] = {"__name__": "page"}
        self.monkeypatch = monkeypatch
        self.sources: list[Path] = []
        self.checked: set[str] = set()
        self.formats: dict[str, str] = {}
        self.others = [plugin for plugin in registry.plugins() if plugin.distribution == HERE]
        """Plugins that tests before this one registered."""
        monkeypatch.chdir(self.folder)
        monkeypatch.delenv("LPQ_LOAD_PLUGINS", raising=False)
        monkeypatch.delenv("LPQ_KERNELS", raising=False)
        monkeypatch.setenv("COLUMNS", "100")

    def run(self, block: Block) -> None:
        assert block.language in KNOWN, f"{block.place}: a block in {block.language!r}; the tests know {sorted(KNOWN)}"
        if block.reason is not None or block.language == "text":
            return
        if block.title is not None:
            self.write(block)
        elif block.language == "python":
            lines = "\n" * block.line  # so that a traceback has the line of the page
            exec(compile(lines + block.code, str(block.page), "exec", dont_inherit=True), self.namespace)
        elif block.language == "toml":
            self.read(block)
        else:
            for command in block.commands():
                self.call(command, block)

    def write(self, block: Block) -> None:
        """A block that is a file, or that goes to the end of a class in a file."""
        path = self.folder / str(block.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        if block.owner is not None:
            path.write_text(inserted(path.read_text(), block.owner, block.code))
        else:
            path.write_text(block.code)
        if path.suffix == ".toml":
            tomllib.loads(path.read_text())
        self.reload()

    def read(self, block: Block) -> None:
        table = tomllib.loads(block.code)
        make = {"recipe": lpq.recipe, "policy": lpq.policy}.get(block.reader or "")
        if make is not None:
            made = make(table)
            assert make(made.to_dict()) == made

    def call(self, command: list[str], block: Block) -> None:
        set_here = dict(word.split("=", 1) for word in command if re.match(r"[A-Z_]+=", word))
        command = command[len(set_here) :]
        if command[0] == "make":
            self.succeed(["make", "--dry-run", *command[1:]], block, cwd=ROOT)
        elif command[:2] == ["pip", "install"]:
            self.install(self.folder / command[-1])
        elif command[0] == "torchrun":
            self.torchrun(command, block)
        elif command[0] == "lpq" and set_here:
            path = os.pathsep.join(map(str, [*self.sources, self.site]))
            self.succeed([sys.executable, "-m", *command], block, env={**os.environ, "PYTHONPATH": path, **set_here})
        elif command[0] == "lpq" and command[1] in IN_A_PROCESS:
            self.checked |= {name.partition("(")[0] for name in command[2:]}
            ended = forking.command(*command[1:])
            assert ended.status == 0, f"{block.place}: {' '.join(command)}\n{ended.out[-4000:]}\n{ended.err[-4000:]}"
        elif command[0] == "lpq":
            with pytest.raises(SystemExit) as ended:
                main(command[1:])
            assert ended.value.code in (0, None), f"{block.place}: {' '.join(command)}"
            self.reload()
        else:
            raise AssertionError(f"{block.place}: cannot run {command[0]}; say why with <!-- not run: … -->")

    def torchrun(self, command: list[str], block: Block) -> None:
        """As torchrun does it; tests of training start torchrun itself."""
        assert command[1] == "--nproc-per-node", f"{block.place}: {command}"
        script = (self.folder / command[3]).read_text()
        for last in (False, True):
            ended = run_forked(int(command[2]), command[3:], script)
            if not any(ended.statuses) or last or "terminate called without an active exception" not in ended.err:
                break  # gloo's threads now and then abort a process that has done all its work
        assert not any(ended.statuses), f"{block.place}: {' '.join(command)}\n{ended.out[-4000:]}\n{ended.err[-4000:]}"

    def install(self, project: Path) -> None:
        """As ``pip install -e``: the metadata is what the project builds to, and the code stays where it is.

        A copy would shadow it; that pip makes one, ``tests/testing/test_new_plugin.py`` shows.
        """
        build = tomllib.loads((project / "pyproject.toml").read_text())["build-system"]["build-backend"]
        backend = importlib.import_module(build)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.chdir(project):
                built = Path(folder) / backend.build_wheel(folder)
            with zipfile.ZipFile(built) as wheel:
                names = [name for name in wheel.namelist() if ".dist-info/" in name]
                for older in self.site.glob(f"{names[0].partition('-')[0]}-*.dist-info"):
                    shutil.rmtree(older)
                wheel.extractall(self.site, names)
        if project not in self.sources:
            self.sources.append(project)
            self.monkeypatch.syspath_prepend(self.site)
            self.monkeypatch.syspath_prepend(project)
        self.reload()

    def succeed(self, command: list[str], block: Block, **where: Any) -> None:
        done = subprocess.run(command, capture_output=True, text=True, **where)
        said = f"{block.place}: {' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == 0, said

    def reload(self) -> None:
        """Forget modules of this folder, whose files may have changed."""
        for name in imported_from(self.folder):
            del sys.modules[name]
        importlib.invalidate_caches()
        registry.refresh()

    def find_formats(self) -> None:
        """Remember the formats of this page, each with what another process needs so as to know of it."""
        for plugin in registry.plugins():
            if plugin.builtin or any(plugin is one for one in self.others):
                continue
            for name, found in plugin.formats.items():
                module = found.quantizer.partition(":")[0]
                register = f"import {module}; lpq.registry.register({module}, name={plugin.name!r})"
                self.formats[name] = register if plugin.distribution == HERE else ""

    def check_formats(self) -> None:
        """Run the kit, once, on the formats of this page that the page does not check itself."""
        left = [name for name in self.formats if name not in self.checked]
        if left:
            register = dict.fromkeys(["import lpq", *(self.formats[name] for name in left)])
            texts = [CHECKED_AS.get(name, name) for name in left]
            code = [*register, "from lpq.__main__ import main", f"main({['check', *texts]!r})"]
            ended = forking.python("\n".join(code))
            assert ended.status == 0, f"lpq check {' '.join(texts)}\n{ended.out[-4000:]}\n{ended.err[-4000:]}"
        self.checked |= {*left}


def inserted(source: str, name: str, code: str) -> str:
    """``source`` with ``code`` at the end of class ``name``."""
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    lines = source.splitlines(keepends=True)
    before, after = lines[: node.end_lineno], lines[node.end_lineno :]
    return "".join([*before, "\n", textwrap.indent(textwrap.dedent(code), "    "), *after])


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    found = Reader(tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    monkeypatch.undo()
    found.reload()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_snippet_runs(page: Path, reader: Reader) -> None:
    for name in NEEDED.get(page.name, ()):
        pytest.importorskip(name, reason=f"needs {name}, which `make install` or `make test-loops` brings")
    for block in blocks(page):
        try:
            reader.run(block)
            reader.find_formats()
        except Exception as error:
            raise AssertionError(f"{block.place} does not run: {type(error).__name__}: {error}") from error
    reader.check_formats()
    assert page.name != "index.md" or page.parent.name != "plugins" or {"int8", "int4", *CHECKED_AS} <= reader.checked


def test_what_is_typed_is_no_printer_queue() -> None:
    for block in (block for page in PAGES for block in blocks(page) if block.language == "shell"):
        assert not re.search(r"^(\$ )?([A-Z_]+=\S+ )*lpq ", block.code, re.MULTILINE), block.place


def test_there_are_snippets_to_run() -> None:
    run = [b for page in PAGES for b in blocks(page) if b.reason is None and b.language != "text"]
    assert {b.language for b in run} == {"python", "shell", "toml", "cpp"}
    assert len(run) > 60


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("per_row", [0, 1])
def test_the_cuda_source_of_the_guide_compiles(per_row: int, tmp_path: Path) -> None:
    """Its launch runs on a GPU only."""
    (source,) = [b for b in blocks(ROOT / "docs/plugins/index.md") if b.language == "cpp"]
    (tmp_path / "decode.cu").write_text(source.code)
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-std=c++17", f"-DPER_ROW={per_row}", "decode.cu", "-o", "decode"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert b"decode" in (tmp_path / "decode").read_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_kernels_of_the_guide_run(backend: str, reader: Reader) -> None:
    for block in blocks(ROOT / "docs/plugins/index.md"):
        if (block.title or "").startswith("lpq-int8/lpq_int8/"):
            reader.write(block)
    reader.monkeypatch.syspath_prepend(reader.folder / "lpq-int8")
    reader.monkeypatch.setenv("LPQ_KERNELS", f"{backend},reference")
    registry.register(importlib.import_module("lpq_int8"), name="int8")
    for text in ("int8", "int8(per=tensor)"):
        for direction, operand in lpq.quantizer(text).quantize(torch.randn(300, 257, device="cuda")).operands:
            assert choose("decode", (operand.quantizer.text,), operand.data.device).backend == backend
            made = operations.decode(operand, torch.float32)
            assert torch.equal(made, operations.decode_reference(operand, torch.float32)), direction


def test_no_fence_is_overlooked() -> None:
    """A fence that is indented, or of another length, would not be found, and so would not run."""
    for page in PAGES:
        fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith(("```", "~~~"))]
        assert len(fences) == 2 * len(blocks(page)), page


def made_up(reader: Reader, text: str) -> list[Block]:
    page = ROOT / "made-up.md"
    folder = reader.folder / "page.md"
    folder.write_text(text)
    return [replace(block, page=page) for block in blocks(folder)]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 2\n```\n",
        "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
        "```shell\nlpq explain no-such-recipe\n```\n",
        "```shell\nmake no-such-target\n```\n",
        "```shell\nrm -rf nothing\n```\n",
        '```python title="x.py"\nimport os\nassert os.environ["RANK"] == "1"\n```\n\n'
        "```shell\ntorchrun --nproc-per-node 2 x.py\n```\n",
        '<!-- read by lpq.recipe -->\n```toml\nfprop = "mxfp9"\n```\n',
        "```toml\nthis is no toml\n```\n",
        "```py\nassert True\n```\n",
        "<!-- not run: -->\n```python\nassert False\n```\n",
    ],
)
def test_a_snippet_that_is_wrong_is_noticed(text: str, reader: Reader) -> None:
    *right, wrong = made_up(reader, text)
    for block in right:
        reader.run(block)
    with pytest.raises((Exception, pytest.fail.Exception)):
        reader.run(wrong)


def test_an_excused_snippet_is_not_run(reader: Reader) -> None:
    (block,) = made_up(reader, "<!-- not run: it takes a week -->\n```python\nassert False\n```\n")
    assert block.reason == "it takes a week"
    reader.run(block)


def meaning(source: str) -> str:
    """A Python source without its docstring and its layout."""
    tree = ast.parse(source)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)


@pytest.mark.parametrize("page", ["README.md", "docs/plugins/index.md"])
def test_the_authors_view_is_what_new_plugin_writes(page: str) -> None:
    written = {path: meaning(text) for path, text in rendered("int8").items() if path.endswith(".py")}
    shown: dict[str, str] = {}
    for block in blocks(ROOT / page):
        title = (block.title or "").removeprefix("lpq-int8/")
        if title in written and block.owner is None:
            shown.setdefault(title, meaning(block.code))  # the first time; the guide changes it later
    assert {"lpq_int8/__init__.py", "lpq_int8/format.py"} <= set(shown)
    assert shown == {path: written[path] for path in shown}
