"""Running ``lpq`` in this process, beside distributions that are installed for one test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lpq import registry
from lpq.__main__ import main

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # what forks processes


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def lpq(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command with these arguments, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        try:
            main(arguments)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
        return Ended(status, *capsys.readouterr())

    return run


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
