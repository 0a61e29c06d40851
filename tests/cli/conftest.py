"""Running ``lpq`` in this process, beside distributions that are installed for one test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Command

from lpq import registry

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # what forks processes


@pytest.fixture
def lpq(lpq_command: Command) -> Command:
    return lpq_command


Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a third-party distribution ``lpq-NAME`` with one plugin ``NAME``, whose source is given."""
    monkeypatch.delenv("LPQ_LOAD_PLUGINS", raising=False)
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, version: str, source: str) -> None:
        info = tmp_path / f"lpq_{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lpq-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lpq.plugins]\n{name} = lpq_{name}_plugin\n")
        (tmp_path / f"lpq_{name}_plugin.py").write_text(textwrap.dedent(source))
        registry.refresh()

    yield put
    for module in [m for m in sys.modules if m.startswith("lpq_") and m.endswith("_plugin")]:
        del sys.modules[module]
    monkeypatch.undo()
    registry.refresh()
