"""``lpq new-plugin``: what it writes is the INT8 format of the design, installs, is listed and passes the kit."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forking import python

from lpq.__main__ import main
from lpq.cli import new_plugin
from lpq.cli.new_plugin import rendered

VIEWS = Path(__file__).parents[1] / "views" / "test_two_views.py"


def code(text: str) -> list[str]:
    """A module's statements without its docstring and its imports, as Python writes them."""
    body = ast.parse(textwrap.dedent(text)).body
    return [
        ast.unparse(node)
        for node in body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def test_it_is_the_format_of_the_design() -> None:
    """Statement for statement the author's view: no longer, and no less plain."""
    spec = importlib.util.spec_from_file_location("two_views", VIEWS)
    assert spec is not None
    assert spec.loader is not None
    views = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(views)
    files = rendered("int8")
    for path in ("lpq_int8/__init__.py", "lpq_int8/format.py"):
        assert code(files[path]) == code(views.AUTHOR[path])


def test_the_name_is_everywhere() -> None:
    files = rendered("my_2nd")
    assert sorted(files) == [
        "README.md", "lpq_my_2nd/__init__.py", "lpq_my_2nd/format.py", "pyproject.toml", "tests/test_my_2nd.py",
    ]  # fmt: skip
    assert "class My2ndQuantizer(Quantizer):" in files["lpq_my_2nd/format.py"]
    assert 'my_2nd = "lpq_my_2nd"' in files["pyproject.toml"]
    assert not [path for path, text in files.items() if "NAME" in text]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lpq-mine").mkdir()
    with pytest.raises(SystemExit):
        main(["new-plugin", "mine", "--dir", str(tmp_path)])
    assert "lpq-mine exists already: remove it, or choose another --dir" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["new-plugin", "mine", "--dir", str(tmp_path / "gone" / "deeper")])
    assert ended.value.code == 1
    assert "deeper is not a folder that exists: make it first, or choose another --dir" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_told_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_plugin, "rendered", lambda name: {"a" * 300: ""})
    with pytest.raises(SystemExit):
        main(["new-plugin", "mine", "--dir", str(tmp_path)])
    assert "cannot be written: File name too long; choose another --dir" in capsys.readouterr().err


@pytest.mark.slow
def test_it_installs_is_listed_and_its_tests_are_the_kit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip, in a process that knows nothing of this one. That it passes the whole kit, the guide to plugins shows,
    which runs ``lpq check`` on what this command writes."""
    with pytest.raises(SystemExit, match="0"):
        main(["new-plugin", "fresh", "--dir", str(tmp_path)])
    assert "lpq check fresh" in capsys.readouterr().out
    package, site = tmp_path / "lpq-fresh", tmp_path / "site"
    pip = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(package)]
    run(*pip)
    listed = json.loads(run("lpq", "formats", "--json", PYTHONPATH=str(site)))
    assert "fresh" in json.dumps(listed)
    kit = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(package)]
    some = ["-vv", "-k", "test_error_is_bounded or test_it_trains", str(package / "tests")]
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    ended = python(f"import pytest; raise SystemExit(pytest.main({[*kit, *some]!r}))")
    assert ended.status == 0, ended.out + ended.err
    assert "test_it_trains[fresh] PASSED" in ended.out
    assert "5 passed" in ended.out


def run(module: str, *arguments: str, **environment: str) -> str:
    """Run a module in a process of its own; its output, if all went well."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
