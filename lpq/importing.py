"""Doing something once another package is imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` when the package of this name has been imported: now, or at the end of its import."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder, Loader):
    """Finds one package as other finders do, and loads it as they would; it leaves once that is done."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()

    def __getattr__(self, name: str) -> Any:
        """Return what that loader has, for whoever only looks for the package."""
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
