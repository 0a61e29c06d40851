"""The plugins of ``examples/``, in the process of a test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lpq import registry

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def plugged(name: str) -> Iterator[None]:
    """Have the plugin ``lpq-NAME`` registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES / f"lpq-{name}")
        module = f"lpq_{name.replace('-', '_')}"
        registry.register(import_module(module), name=module.removeprefix("lpq_"))
        try:
            yield
        finally:
            registry.refresh()


def evidence_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script ``evidence.py`` of an example, as a module with small sizes."""
    spec = importlib.util.spec_from_file_location(f"evidence_of_{name}", EXAMPLES / f"lpq-{name}" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    evidence = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evidence)
    for size in ("TOKENS", "INPUTS", "OUTPUTS"):
        monkeypatch.setattr(evidence, size, 256)
    return evidence
