"""Which part of the conformance kit a run inside this process collects: each time all modules are imported anew."""

from __future__ import annotations

from lpq.testing import conformance


def modules_with(tests: str) -> list[str]:
    """The modules of the kit that have tests with one of these words in their names: ``a or b``, as ``-k`` has it."""
    words = tests.split(" or ")
    return sorted({getattr(conformance, t).__module__ for t in conformance.__all__ if any(word in t for word in words)})
