"""``lpq check``: it runs the kit wherever one stands, and what cannot be run is said in words."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import broken_formats as broken
import pytest
from forking import command

from lpq import registry
from lpq.__main__ import main


@pytest.fixture
def sad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A format ``sad``, whose module is no Python."""
    (tmp_path / "no_python.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    registry.register(broken.Plugin(broken.Int8, names="sad", quantizer="no_python:Sad"), name="sad")
    yield
    registry.refresh()


def test_a_format_is_checked_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the settings of a project that one stands in nor its tests come into it, nor a plugin of pytest that
    happens to be there, and no file is left."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbroken = broken_for_pytest\n")
    (tmp_path / "broken_for_pytest.py").write_text("raise RuntimeError('this is broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "test_mine.py").write_text("def test_mine(): assert False\n")
    for folder in (tmp_path, tmp_path / "tests"):
        folder.mkdir(exist_ok=True)
        (folder / "conftest.py").write_text("raise SystemExit('a conftest.py of somebody else was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    ended = command("check", "mxfp8()", "-k", "test_text or test_known", "-v")
    assert ended.status == 0, ended.out + ended.err
    assert "test_text_makes_the_same_quantizer[mxfp8] PASSED" in ended.out
    assert "2 passed" in ended.out
    assert not {".hypothesis", ".pytest_cache"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("ended", [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED])
def test_pytests_status_is_its_own(ended: pytest.ExitCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """That no test matches is told from that one fails."""
    ran: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda options: ran.append(options) or ended)
    monkeypatch.setattr("hypothesis.configuration.set_hypothesis_home_dir", lambda folder: None)
    with pytest.raises(SystemExit) as exited:
        main(["check", "mxfp8()", "-k", "no_test_is_called_so"])
    assert exited.value.code == ended
    ((*_, before, select),) = ran
    assert (before, select) == ("-k", "no_test_is_called_so")


def test_an_expression_that_is_none_is_an_error_as_any_other() -> None:
    """pytest has a status of its own for it, and its own way to say it."""
    ended = command("check", "identity", "-k", "rows and")
    assert ended.status == 2
    assert ended.err.startswith("lpq: Wrong expression passed to '-k': rows and: ")
    assert ended.err.count("\n") == 1


def test_a_format_that_cannot_be_used_is_said(sad: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, and before any test is collected."""
    with pytest.raises(SystemExit, match="1"):
        main(["check", "sad"])
    said = capsys.readouterr()
    assert said.err.startswith("lpq: ")
    assert said.err.count("importing no_python:Sad raised SyntaxError") == 1
    assert said.out == ""


def test_without_pytest_or_hypothesis_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find(name))
    with pytest.raises(SystemExit) as ended:
        main(["check", "mxfp8"])
    assert ended.value.code == 1
    assert "needs hypothesis: pip install 'lpq[check]'" in capsys.readouterr().err
