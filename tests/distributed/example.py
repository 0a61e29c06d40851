"""The example of a third party's format, for tests that start processes."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpq import registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "lpq-int4"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what ``pip install`` would leave of it: one folder for all tests, so that ranks find one ``sys.path``."""
    folder = tmp_path_factory.mktemp("int4")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"lpq_int4-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    plugins = project["entry-points"]["lpq.plugins"]
    entries = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (info / "entry_points.txt").write_text(f"[lpq.plugins]\n{entries}")
    return folder


@pytest.fixture
def int4(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example, as if it were installed; in the processes of ranks, too: they have this ``sys.path``."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(installed)
    registry.refresh()
    yield
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "lpq_int4"]:
        del sys.modules[name]  # a page of the docs writes a package of this name
    registry.refresh()
