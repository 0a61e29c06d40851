"""Lets the tests of this folder import what they share, and what those of the CPU do."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
import torch

T = TypeVar("T")
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


@pytest.hookimpl(trylast=True)  # after the tests that no -m chooses are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have workers begin with the kit's comparisons of kernels, one each: they take minutes, other tests seconds.

    By ``--dist worksteal`` each worker gets an equal part of the tests in their order, and one that is done takes
    from another's end.
    """
    if torch.cuda.is_available():
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        long = [item for item in items if item.name.startswith("test_kernels_equal_the_reference")]
        long.sort(key=lambda item: ("quantize" not in item.name, "triton" not in item.name))  # the longest first
        items[:] = at_the_starts(long, [item for item in items if item not in long], workers)


def at_the_starts(long: list[T], rest: list[T], workers: int) -> list[T]:
    """All of ``long`` and ``rest`` in an order in which each worker's part begins with its share of ``long``."""
    ordered, short = [], iter(rest)
    for worker in range(workers):
        size, first = (len(long) + len(rest) - len(ordered)) // (workers - worker), long[worker::workers]
        ordered += [*first, *islice(short, max(size - len(first), 0))]
    return ordered


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
