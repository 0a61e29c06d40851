"""A conversion that is refused, or a fusion that fails, changes no module, whatever was done to modules by then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def undone_if_refused(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model their classes and attributes back if an error is raised inside: a layer may have
    adopted one of them, or a block may have been extended, before another one is refused."""
    before = []
    for m in model.modules():
        own = vars(m), *vars(m).values(), getattr(vars(m).get("passes"), "__dict__", None)
        before.append((m, type(m), [(t, t.copy()) for t in own if isinstance(t, dict)]))
    try:
        yield
    except Exception:
        for module, cls, tables in before:
            module.__class__ = cls
            for table, content in tables:  # in place: handles of hooks refer to tables
                table.clear()
                table.update(content)
        raise
