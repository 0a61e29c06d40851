"""The suite sees lpq's own plugins and the fakes that a test installs, whatever else this environment has.

So it needs no environment of its own: a plugin of a third party may be installed beside lpq. Tests that look
into another process see what is there, and must say what they look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lpq import registry
from lpq.registry.loader import GROUP, OWN

STARTING_RANKS = ("checkpoint", "distributed", "train")
"""Folders of tests that start processes, and wait for them half of their time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules of tests that wait come between the others: workers that all wait leave processors idle."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    waiting = [tests for path, tests in modules.items() if path.parent.name in STARTING_RANKS]
    others = [tests for path, tests in modules.items() if path.parent.name not in STARTING_RANKS]
    placed = sorted([*_spread(waiting), *_spread(others)], key=lambda place: place[0])
    items[:] = [item for _, tests in placed for item in tests]


def _spread(modules: list[list[pytest.Item]]) -> Iterator[tuple[float, list[pytest.Item]]]:
    """Modules with their places between 0 and 1."""
    before, every = 0, sum(map(len, modules))
    for tests in modules:
        yield (before + len(tests) / 2) / every, tests
        before += len(tests)


def pytest_configure(config: pytest.Config) -> None:
    """Hide what is installed now and is not lpq; before collection, which asks for all formats."""
    found = metadata.entry_points

    def place(entry: metadata.EntryPoint) -> tuple[str, str]:
        assert entry.dist is not None
        return str(entry.dist.locate_file("")), entry.dist.name

    foreign = {place(entry) for entry in found(group=GROUP)}
    foreign = {(folder, name) for folder, name in foreign if name != OWN}

    def without_foreign(**wanted: Any) -> metadata.EntryPoints:
        entries = found(**wanted)
        if wanted.get("group") != GROUP:
            return entries
        return metadata.EntryPoints(entry for entry in entries if place(entry) not in foreign)

    patch = pytest.MonkeyPatch()
    patch.setattr(metadata, "entry_points", without_foreign)
    config.add_cleanup(patch.undo)
    registry.refresh()
