"""The example of a third party's format, for tests that start processes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpq import registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "lpq-mxfp4"


@pytest.fixture
def mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example, as if it were installed; in processes that are spawned, too: they inherit ``sys.path``."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"lpq_mxfp4-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    plugins = project["entry-points"]["lpq.plugins"]
    entries = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (info / "entry_points.txt").write_text(f"[lpq.plugins]\n{entries}")
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()
