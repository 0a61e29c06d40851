"""The processes that run the other tests of this folder: what a test leaves behind, and how one fails."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import odd_formats
import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError
from ranks import spawn
from support import plugins
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from lpq import registry
from lpq.registry.loader import GROUP

RANKS = 2
TASKS = "/proc/self/task"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(RANKS)
    yield made
    made.close()


def _note(rank: int, folder: Path, name: str) -> None:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == RANKS
    (folder / f"{name}{rank}").write_text(str(os.getpid()))


def _noted(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}{rank}").read_text() for rank in range(RANKS)]


def test_ranks_are_started_once(tmp_path: Path) -> None:
    spawn(_note, RANKS, tmp_path, "a")
    spawn(_note, RANKS, tmp_path, "b")
    spawn(_note, RANKS, tmp_path, "fresh", fresh=True)
    spawn(_note, RANKS, tmp_path, "c")
    first = _noted(tmp_path, "a")
    assert len({*first, str(os.getpid())}) == 3
    assert _noted(tmp_path, "b") == _noted(tmp_path, "c") == first
    assert not {*_noted(tmp_path, "fresh")} & {*first}


def test_ranks_without_a_call_are_paused(pool: Pool) -> None:
    """They have a thread that would wake up a hundred times a second."""
    pool.run(_group)
    for one in pool._processes:
        state, end = Path(f"/proc/{one.pid}/stat"), time.monotonic() + 30
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end


def _group(rank: int) -> None:
    dist.new_group([0, 1])


def _threads(name: str) -> int:
    """The threads of this process with a name."""
    return [path.read_text() for path in Path(TASKS).glob("*/comm")].count(f"{name}\n")


def _each_group_has_one_thread(rank: int) -> None:
    threads, groups, every = _threads("pt_gloo_runloop"), len(distributed_c10d._world.pg_map), len(os.listdir(TASKS))
    for group in (dist.new_group([0, 1]), init_device_mesh("cpu", (2, 1)).get_group(1)):
        dist.all_reduce(torch.ones(()), group=group)
    made = len(distributed_c10d._world.pg_map) - groups
    assert _threads("pt_gloo_runloop") - threads == len(os.listdir(TASKS)) - every == made >= 2
    assert os.sched_getscheduler(0) == os.SCHED_BATCH or torch.cuda.is_available()
    assert gc.isenabled()


@pytest.mark.skipif(not Path(TASKS).is_dir(), reason="counts threads in /proc")
def test_a_group_has_one_thread_as_two_corrupt_the_heap() -> None:
    """And one thread reads for all groups, as many would ask for locks again and again."""
    spawn(_each_group_has_one_thread, RANKS)


def _note_one(rank: int, folder: Path) -> None:
    (folder / f"{rank} of {dist.get_world_size()}").touch()


def test_any_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 3, 2):
        spawn(_note_one, ranks, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"{rank} of {n}" for n in (1, 2, 3) for rank in range(n)}


# ---------------------------------------------------------------------------------- what is left behind


def _leave(rank: int) -> None:
    os.environ["LEFT"] = "behind"
    del os.environ["HANDED"]
    os.chdir("/")
    sys.path.insert(0, "/left/behind")
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    odd_formats.register()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    dist.new_group([0])


def _as_new(rank: int, here: str) -> None:
    assert "LEFT" not in os.environ
    assert os.environ["HANDED"] == "over"
    assert os.getcwd() == here
    assert "/left/behind" not in sys.path
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(0)))
    assert torch.ones(1).dtype == torch.float32
    assert torch.ones(1).device.type == "cpu"
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    warnings.warn("this is no error", stacklevel=1)
    assert not set(odd_formats.NAMES) & set(registry.formats())
    assert not torch._dynamo.eval_frame.cached_backends


def _finds(rank: int, name: str, found: bool) -> None:
    assert (name in {entry.name for entry in metadata.entry_points(group=GROUP)}) == found


def test_a_plugin_that_the_test_does_not_find_is_not_found_by_ranks(tmp_path: Path, install: plugins.Install) -> None:
    install("some", "1.0", "")
    before, pool = {*plugins.hidden}, Pool(RANKS)
    try:
        for found, places in ((True, before), (False, {*before, (str(tmp_path), "lpq-some")}), (True, before)):
            plugins.hide(places)
            _finds(0, "some", found)
            pool.run(_finds, "some", found)
    finally:
        plugins.hide(before)
        pool.close()


def test_what_a_test_leaves_behind_is_gone(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDED", "over")
    pool.run(_as_new, os.getcwd())
    pool.run(_leave)
    pool.run(_as_new, os.getcwd())


def _imports(rank: int, name: str) -> None:
    __import__(name)


def test_ranks_import_what_the_test_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("first", "second"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "imported_by_ranks.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'seen')!r}).touch()")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            spawn(_imports, RANKS, "imported_by_ranks")
        assert (folder / "seen").exists()
    with pytest.raises(RankError, match="No module named 'imported_by_ranks'"):
        spawn(_imports, RANKS, "imported_by_ranks")


# ---------------------------------------------------------------------------------- what fails


def _fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("not today" * 1_000_000)  # more than a pipe holds
        if how == "exit":
            sys.exit(0)
        if how == "vanish":
            os._exit(7)
        if how == "abort":
            os.abort()
        if how == "hang":
            time.sleep(600)
    dist.barrier()


FAILURES = {
    "raise": r"rank 1 of 2: Traceback .*ValueError: not today.*rank 0 of 2 has not ended 1 s later.*in _fail",
    "exit": r"rank 1 of 2: Traceback .*SystemExit: 0",
    "vanish": r"rank 1 of 2: the process ended with exit code 7",
    "abort": r"rank 1 of 2: the process ended with exit code -6, and was at\nFatal Python error: Aborted\n.*in _fail",
    "hang": r"rank 0 of 2 has not ended 1.5 s later.*barrier.*rank 1 of 2 has not ended 1.5 s later.*in _fail",
}


@pytest.mark.parametrize("how", FAILURES)
def test_what_fails_in_one_rank_ends_all_and_is_told(how: str, tmp_path: Path) -> None:
    spawn(_note, RANKS, tmp_path, "before")
    began = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){FAILURES[how]}"):
        spawn(_fail, RANKS, how, patience=1.5 if how == "hang" else 60)
    assert time.monotonic() - began < 30
    spawn(_note, RANKS, tmp_path, "after")
    assert not {*_noted(tmp_path, "before")} & {*_noted(tmp_path, "after")}
    for pid in _noted(tmp_path, "before"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def _parts_without_the_other(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))


def test_a_collective_that_one_rank_left_out_is_not_the_next_tests(pool: Pool) -> None:
    with pytest.raises(RankError):
        pool.run(_parts_without_the_other, patience=2)


def test_what_cannot_be_handed_over_ends_nothing(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        pool.run(_note, lambda: None)
    pool.run(_note, tmp_path, "after")
