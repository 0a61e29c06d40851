"""The example distribution: what its metadata says is there, and its own tests, the kit among them, pass."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from forking import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "lpq-int4"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example for processes that are forked: its sources and its metadata on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"lpq_int4-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    plugins = project["entry-points"]["lpq.plugins"]
    entries = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (info / "entry_points.txt").write_text(f"[lpq.plugins]\n{entries}")
    for folder in (tmp_path, EXAMPLE):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTEST_ADDOPTS", "")


def test_it_is_no_part_of_lpq() -> None:
    """Neither the wheel nor lpq's own metadata knows of it."""
    lpq = (EXAMPLE.parents[1] / "pyproject.toml").read_text()
    wheel = tomllib.loads(lpq)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert not [package for package in wheel if "int4" in package or package.startswith("examples")]


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_its_own_tests_pass() -> None:
    """The conformance kit, the formulas, and training in a mixture."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(EXAMPLE)]
    ended = python(f"import pytest; raise SystemExit(pytest.main({[*options, str(EXAMPLE / 'tests')]!r}))")
    assert ended.status == 0, ended.out + ended.err
    assert " passed" in ended.out
