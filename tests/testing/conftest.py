"""Lets the tests of this folder import the formats of those on several ranks, and run pytest inside this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(autouse=True)
def compiler_is_imported(request: pytest.FixtureRequest) -> None:
    """Import the compiler for a run inside this process. Afterwards all modules are taken out that were not there
    before: Triton's library ends the process if it is imported a second time, and Inductor raises."""
    if "pytester" in request.fixturenames:
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401
