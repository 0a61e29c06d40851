"""Running ``lpq`` in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.commands import Command

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # what forks processes


@pytest.fixture
def lpq(lpq_command: Command) -> Command:
    return lpq_command
