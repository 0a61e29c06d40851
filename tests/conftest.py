"""The suite sees lpq's own plugins and the fakes that a test installs, whatever else this environment has.

So it needs no environment of its own: a plugin of a third party may be installed beside lpq. Ranks see what the test
sees. Tests that look into other processes see what is there, and must say what they look for.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import costly
import failing
import pytest
from commit import commit
from hypothesis import settings
from support.commands import lpq_command
from support.plugins import hide, install, third_parties

from lpq import registry

__all__ = ["install", "lpq_command"]

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("distributed", "formats")]  # which others share
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or each process compiles and loads a file to see
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # or it searches for garbage after each frame
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile=thorough takes its place


def take_turns_on_gpus() -> None:
    """Let each worker count the GPUs from another one on: tests of one GPU all ask for the first."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    import torch  # which the process that hands out tests has no need of

    count = torch.cuda.device_count()
    if count > 1:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        first = int(worker.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_configure(config: pytest.Config) -> None:
    """Hide what is installed now and is not lpq; before collection, which asks for all formats."""
    take_turns_on_gpus()
    failing.pytest_configure(config)
    hide(third_parties())
    config.add_cleanup(lambda: hide(()))
    registry.refresh()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without searches for garbage, and leave out of later ones all that is there when the tests begin.

    It stays, and to search it takes as long as a fifth of all collecting. Later searches are seldom: after 700 new
    objects each, as is usual, they take 3 to 8 % of the time of tests. A test that waits for one calls gc.collect.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries count what is left of theirs


@pytest.fixture
def register() -> Iterator[Callable[..., object]]:
    """Register plugins in this process, which forgets them after the test."""
    yield registry.register
    registry.refresh()


@pytest.fixture
def no_storm() -> Iterator[None]:
    """Have an error raised where torch compiles one function more often than its limit: beyond that it would run it
    eagerly."""
    from torch._dynamo import config

    usual = {"fail_on_recompile_limit_hit": True, "recompile_limit": 8}  # other tests may have raised the limit
    with config.patch(usual):  # type: ignore[no-untyped-call]
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    import torch
    from seeding import seed_the_cpu_alone

    if not torch.cuda.is_available():
        seed_the_cpu_alone()
    patch = pytest.MonkeyPatch()
    costly.guard(patch)
    session.config.add_cleanup(patch.undo)


def pytest_sessionfinish() -> None:
    """Search for garbage here, once: pytest would do it five times, each through all that the tests left."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers > 1:
        items[:] = costly.shared_out(items, workers)


def pytest_itemcollected(item: pytest.Item) -> None:
    costly.mark(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say at the very end which commit was tested: a log of GPU tests is read on another machine."""
    yield
    terminalreporter.write_line(f"tested commit: {commit(Path(__file__).parents[1])}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with costly.guarded(item):
        return (yield)
