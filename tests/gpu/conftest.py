"""Lets the tests of this folder import what they share, and what those of the CPU do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "formats"), str(HERE.parent / "distributed")]


class WithoutDevice(pytest.Module):
    """A file of tests where there is no GPU: imported, so that a fault in it shows, and skipped as a whole."""

    def collect(self) -> NoReturn:
        assert self.obj
        pytest.skip("needs a CUDA device")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else WithoutDevice.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget layers that other tests of this process compiled: they count towards torch's limit of compilations."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the kit's comparisons of kernels over all tests: each takes minutes, and workers get tests in a row."""
    if torch.cuda.is_available():
        long = [item for item in items if item.name.startswith("test_kernels_equal_the_reference")]
        rest = [item for item in items if item not in long]
        apart = len(rest) // max(len(long), 1)
        for number, item in enumerate(long):
            rest.insert(number * (apart + 1), item)
        items[:] = rest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
