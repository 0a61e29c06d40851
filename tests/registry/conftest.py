"""Fake distributions on a temporary path: what ``pip install`` would leave there, and nothing else."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plugins import imported_from

from lpq import registry


class Site:
    """A folder on ``sys.path`` into which distributions are installed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, name: str, version: str, plugins: dict[str, str], modules: dict[str, str] | None = None) -> None:
        """Install a distribution with these entry points and these module sources."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        entries = "".join(f"{plugin} = {target}\n" for plugin, target in plugins.items())
        (info / "entry_points.txt").write_text(f"[lpq.plugins]\n{entries}")
        for module, source in (modules or {}).items():
            path = self.path / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        registry.refresh()

    def format(self, plugin: str, name: str | None = None) -> str:
        """The source of a plugin that registers one format, whose classes are in ``<plugin>_quantizer``."""
        return textwrap.dedent(f"""
            from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

            SPEC = FormatSpec(name="{name or plugin}", summary="a fake", effective_bits=8,
                              quantizer="{plugin}_quantizer:FakeQuantizer",
                              storage="{plugin}_quantizer:FakeStorage")

            @hookimpl
            def lpq_register_formats():
                return SPEC
        """)

    def imported(self) -> set[str]:
        """The modules of this folder that are imported."""
        return imported_from(self.path)


QUANTIZER = """
    from dataclasses import dataclass
    from typing import Any

    class FakeStorage: ...

    @dataclass(frozen=True)
    class FakeQuantizer:
        block: str = "1x16"
        rht: bool = False
        margin: int = 0
        factor: float = 1.0
        inner: Any = None

        @classmethod
        def from_options(cls, **options):
            return cls(**options)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An environment whose lpq has one built-in format, ``base``; it hides the lpq that is installed."""
    monkeypatch.delenv("LPQ_LOAD_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = Site(tmp_path)
    found.install(
        "lpq",
        "9.9",
        {"base": "base_plugin"},
        {"base_plugin": found.format("base"), "base_quantizer": QUANTIZER},
    )
    yield found
    for name in found.imported():
        del sys.modules[name]
    registry.refresh()
