"""Formats of third parties: registered in the process of a test, or in distributions that are installed for it; and
those that this environment has, which tests do not see."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lpq import registry
from lpq.registry import FormatSpec, hookimpl
from lpq.registry.loader import GROUP, OWN

if TYPE_CHECKING:
    from lpq.core import Quantizer, Storage

Install = Callable[[str, str, str], None]
Place = tuple[str, str]
"""The folder and the name of a distribution."""
hidden: set[Place] = set()
"""The distributions whose plugins this process does not find."""
_entry_points = metadata.entry_points


def _place(entry: metadata.EntryPoint) -> Place:
    assert entry.dist is not None
    return str(entry.dist.locate_file("")), entry.dist.name


def third_parties() -> set[Place]:
    """The distributions of third parties that are installed now and have plugins."""
    found = {_place(entry) for entry in _entry_points(group=GROUP)}
    return {(folder, name) for folder, name in found if name != OWN}


def hide(places: Iterable[Place]) -> None:
    """Let this process find the plugins of all distributions but these. The registry must be refreshed then."""
    hidden.clear()
    hidden.update(places)
    metadata.entry_points = _without_hidden if hidden else _entry_points


def _without_hidden(**wanted: Any) -> metadata.EntryPoints:
    entries = _entry_points(**wanted)
    if wanted.get("group") != GROUP:
        return entries
    return metadata.EntryPoints(entry for entry in entries if _place(entry) not in hidden)


def imported_from(folder: Path) -> set[str]:
    """The imported modules whose files are below a folder. To make a ``Path`` of each takes ten times as long."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    return {name for name, file in files.items() if file and file.startswith(f"{folder}{os.sep}")}


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


class FormatPlugin:
    """A plugin with one format, made of these classes of a test's module."""

    def __init__(self, name: str, quantizer: type[Quantizer], storage: type[Storage]) -> None:
        first, second = (f"{cls.__module__}:{cls.__name__}" for cls in (quantizer, storage))
        self.spec = FormatSpec(name=name, summary="a test's", quantizer=first, storage=second, effective_bits=8)

    @hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return self.spec
