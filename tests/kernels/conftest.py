"""Lets the tests of this folder import what they share, and imitates launches."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import imitated  # noqa: E402  (from where it was just added)


@pytest.fixture(scope="session", autouse=True)
def share_imitations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that are compiled for a CPU are shared by the processes that xdist runs the tests in."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    imitated.shared_folder = folder / "imitated"
    imitated.shared_folder.mkdir(exist_ok=True)
    yield
    shutil.rmtree(imitated.shared_folder, ignore_errors=True)


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of the kernels whose launches are imitated during the test."""
    with imitated.launches() as names:
        yield names
