"""Which ranks act together: those that share the model. Bad arguments on one of them are an error on all."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpointed import Net, model_differences, optimizer_differences, optimizer_of, shard
from ranks import all_say, mesh_of, spawn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning, writing
from lpq.checkpoint.ranks import CheckpointRanks
from lpq.distributed import meeting
from lpq.registry.errors import LpqError

SMALL = {"tensor": "fp8", "mx": "mxfp8"}


def _layers() -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8-current")


def _actions(folder: Path) -> dict[str, Callable[..., object]]:
    """Each action on a model that no rank shares with another."""
    net, layers = Net(1, 64, SMALL), _layers()
    return {
        "save": lambda **group: checkpoint.save(net, folder / "saved", **group),
        "save_async": lambda **group: checkpoint.save_async(net, folder / "later", **group).wait(),
        "one file": lambda **group: lpq.export(net, folder / "one.pt", layout="lpq", **group),
        "export": lambda **group: lpq.export(layers, folder / "files", layout="compressed-tensors", **group),
        "export of a path": lambda **group: lpq.export(folder / "layers", folder / "again", **group),
        "calibrate": lambda **group: lpq.calibrate(_layers(), [torch.ones(2, 64)], **group),
    }


def _rank_0_alone(rank: int, folder: Path) -> None:
    """It waits for none of the others. They are refused, as they may hold the same model or another one."""
    if rank == 0:
        checkpoint.save(_layers(), folder / "layers")
        for act in _actions(folder).values():
            act()
    dist.barrier()  # which rank 0 would not reach
    fresh = Net(2, 64, SMALL)
    for name in ("saved", "later"):
        checkpoint.load(fresh, folder / name)
        assert model_differences(fresh, Net(1, 64, SMALL)) == {}
    assert (folder / "one.pt").exists()
    assert (folder / "files").exists()
    assert (folder / "again").exists()
    if rank:
        for act in _actions(folder / "none").values():
            with pytest.raises(LpqError, match=r"rank 0 alone [\w ]+ a model .*this is rank 1: call it under `if rank"):
                act()
    assert not (folder / "none").exists()


def _replicas_are_whole_on_each(rank: int, folder: Path) -> None:
    """Rank 0 saves and exports the wrapper alone; what writes to a model is for all of them, and says so."""
    net = DistributedDataParallel(_layers())
    if rank == 0:
        checkpoint.save(net, folder / "saved")
        checkpoint.save_async(net, folder / "later").wait()
        lpq.export(net, folder / "one.pt", layout="lpq")
        lpq.export(net, folder / "files", layout="compressed-tensors")
        assert dict(lpq.export.stream(net, "compressed-tensors"))
        for act in (
            lambda: checkpoint.load(net, folder / "saved"),
            lambda: checkpoint.import_file(net, folder / "one.pt"),
            lambda: lpq.calibrate(net, [torch.ones(2, 64)]),
            lambda: checkpoint.save(net, folder / "x", process_group=dist.group.WORLD),
        ):
            with (
                mock.patch.object(meeting, "limit", return_value=0.1),
                pytest.raises(LpqError, match=r"rank 0 \w+ a model that the ranks 0, 1 share"),
            ):
                act()
    dist.barrier()  # which rank 0 would not reach
    checkpoint.load(net, folder / "saved")
    with (
        pytest.raises(LpqError, match="rank 0 alone saves a model that is whole on each rank")
        if rank
        else nullcontext()
    ):
        checkpoint.save(net, folder / "again")
    checkpoint.save(net, folder / "together", process_group=dist.group.WORLD)


def _one_rank_reads(rank: int, folder: Path) -> None:
    """A checkpoint, and into a model of its own. Where that is read which ranks share, a rank that does not says so."""
    if rank == 0:
        checkpoint.save(Net(1, 64, SMALL), folder / "saved")
        lpq.export(Net(1, 64, SMALL), folder / "one.pt", layout="lpq")
    dist.barrier()
    if rank == 1:
        checkpoint.info(folder / "saved")
        checkpoint.load(fresh := Net(2, 64, SMALL), folder / "saved")
        assert model_differences(fresh, Net(1, 64, SMALL)) == {}
        checkpoint.import_file(fresh := Net(2, 64, SMALL), folder / "one.pt")
        assert model_differences(fresh, Net(1, 64, SMALL)) == {}
    dist.barrier()  # which rank 1 would not reach


def _a_group_acts_together(rank: int, folder: Path) -> None:
    """Its ranks have the same files, and scales that cover the inputs of all of them."""
    group = dist.group.WORLD
    checkpoint.save(_layers(), folder / "layers", process_group=group)
    for name, act in _actions(folder).items():
        if name != "save_async":  # it would talk over the group of the test
            act(process_group=group)
    layers = _layers()
    lpq.calibrate(layers, [torch.full((2, 64), 1.0 + rank)], process_group=group)
    assert layers[0].static_values()["x_amax"] == 2
    streamed = dict(lpq.export.stream(_layers(), "compressed-tensors")) if rank == 0 else {}  # each its own
    assert rank or streamed


def _bad_arguments_of_one_rank(rank: int, folder: Path) -> None:
    net: Any = shard(Net(1, 64, SMALL), mesh_of())
    layers: Any = shard(_layers(), mesh_of())
    batches = [torch.ones(2, 64)]
    bad = rank == 1
    path: Any = 3 if bad else folder / "net"
    for function, words in (
        (lambda: checkpoint.save(net, folder, step=-1 if bad else 1), "rank 1: save: step=-1: it is a whole number"),
        (lambda: checkpoint.save(net, folder, step=1, keep=0 if bad else 1), "rank 1: keep=0: it is how many"),
        (
            lambda: checkpoint.save_async(net, folder, step="1" if bad else 1),
            "rank 1: save: step='1': it is a whole number",
        ),
        (lambda: checkpoint.save(net, path), "rank 1: directory must be str or Path, got int"),
        (lambda: checkpoint.load(net, path), "rank 1: path must be str or Path, got int"),
        (lambda: checkpoint.info(path, process_group=dist.group.WORLD), "rank 1: path must be str or Path, got int"),
        (lambda: lpq.export(net, path, layout="lpq"), "rank 1: path must be str or Path, got int"),
        (lambda: checkpoint.import_file(net, path), "rank 1: path must be str or Path, got int"),
        (lambda: checkpoint.save(3 if bad else net, folder / "y"), "rank 1: model must be a torch.nn.Module, got int"),
        (lambda: lpq.export(layers, path), "rank 1: path must be str or Path, got int"),
        (lambda: lpq.export(3 if bad else layers, folder / "x"), "rank 1: model must be a torch.nn.Module or the dir"),
        (lambda: lpq.calibrate(layers, batches, samples=0 if bad else 1), "rank 1: calibrate: samples=0: it is"),
        (lambda: lpq.calibrate(layers, batches, state=path), "rank 1: state must be str or Path, got int"),
        (lambda: lpq.calibrate(layers, batches, siblings=[("a", "b")] if bad else [("0", "1")]), r"rank 1: siblings"),
    ):
        all_say(function, words)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    "check",
    [_rank_0_alone, _replicas_are_whole_on_each, _one_rank_reads, _a_group_acts_together, _bad_arguments_of_one_rank],
)
def test_two_ranks(check: Callable[[int, Path], None], tmp_path: Path) -> None:
    spawn(check, 2, tmp_path)


# ---------------------------------------------------------------------------------------------- groups


ALONE, PAIR = [0], [1, 2]


@pytest.mark.parametrize(
    ("meshes", "words"),
    [
        ([[], [], [], []], None),  # replicas, of which nobody knows more
        ([[(0, 1, 2, 3)], [(0, 1, 2, 3)], [(0, 1, 2, 3)], [(0, 1, 2, 3)]], None),
        ([[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(2, 3), (0, 2)], [(2, 3), (1, 3)]], None),  # joined by steps
        ([[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]], r"no tensor joins the ranks \[0, 1\] and \[2, 3\]"),
        ([[(0, 1)], [(0, 1)], [], []], r"no tensor joins the ranks \[0, 1\] and \[2\] and \[3\]"),
        (
            [[(3, 4)], [], [], []],
            r"lies over the ranks \[3, 4\], and the ranks that call this together are \[0, 1, 2, 3\]",
        ),
    ],
)
def test_ranks_have_one_model_if_its_tensors_join_them(meshes: Any, words: str | None) -> None:
    ranks: Any = SimpleNamespace(names=[0, 1, 2, 3])
    found = [frozenset(own) for own in meshes]
    if words is None:
        CheckpointRanks.check_one_model(ranks, found)
    else:
        with pytest.raises(CheckpointError, match=words):
            CheckpointRanks.check_one_model(ranks, found)


def _models_of_their_own(folder: Path, make: Callable[[int], nn.Module], **group: Any) -> None:
    """Their tensors have the same names, and one model would be made of both."""
    net = make(1)
    words = (
        r"no tensor joins the ranks \[0\] and \[1, 2\], so these have models of their own.*process_group=mesh\.get_gr"
    )
    for function in (
        lambda: checkpoint.save(net, folder / "mixed", step=1, **group),
        *(() if group else (lambda: checkpoint.save_async(net, folder / "mixed", step=1),)),
        lambda: checkpoint.load(net, folder / "whole", **group),
        lambda: lpq.export(net, folder / "mixed.pt", layout="lpq", **group),
        lambda: checkpoint.import_file(net, folder / "whole.pt", **group),
    ):
        all_say(function, words)
    assert not (folder / "mixed").exists()
    assert not (folder / "mixed.pt").exists()


def _each_by_itself(
    folder: Path, mine: list[int], group: dist.ProcessGroup, writers: dist.ProcessGroup, mesh: DeviceMesh
) -> None:
    seed, own = mine[0] + 1, folder / str(mine[0])
    net = shard(Net(seed, 64, SMALL), mesh)
    optimizer = optimizer_of(net, seed)
    truth = Net(seed, 64, SMALL)
    checkpoint.save(net, own, optimizer, step=1, process_group=group)
    words = r"training talks over process_group, and would while it is written: pass one that is for this alone"
    all_say(lambda: checkpoint.save_async(net, own, optimizer, step=2, process_group=group), words, group)
    saving = checkpoint.save_async(net, own, optimizer, step=2, process_group=writers)
    checkpoint.save(net, own, optimizer, step=3, process_group=writers)  # which waits for the other one
    assert saving.wait() == own / "step-00000002"
    lpq.export(net, own / "one.pt", layout="lpq", process_group=group)
    assert checkpoint.info(own, process_group=group).step == 3
    for number in (1, 2, 3):
        fresh = shard(Net(9, 64, SMALL), mesh)
        its = optimizer_of(fresh, None)
        checkpoint.load(fresh, own / f"step-0000000{number}", its, process_group=group)
        assert model_differences(fresh, truth) == {}
        assert optimizer_differences(its, optimizer_of(truth, seed)) == {}
    checkpoint.import_file(fresh := shard(Net(9, 64, SMALL), mesh), own / "one.pt", process_group=group)
    assert model_differences(fresh, truth) == {}


def _within_the_pair(rank: int, folder: Path, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    net = shard(Net(1, 64, SMALL), mesh)
    for make in (torch.optim.SGD, torch.optim.AdamW):
        given = make([p for p in net.parameters() if p.requires_grad], lr=0.1) if rank == 2 else None
        words = rf"rank 1 has \[no optimizer\], and rank 2 has \[{make.__name__}\]\. Pass the same"
        for function in (
            lambda: checkpoint.save(net, folder / "given", given, process_group=group),  # noqa: B023
            lambda: checkpoint.save_async(net, folder / "given", given, process_group=group),  # noqa: B023
            lambda: checkpoint.load(net, folder / "1", given, process_group=group),  # noqa: B023
        ):
            all_say(function, words, group)
    stepped = optimizer_of(net, 1)
    if rank == 2:
        stepped.state.clear()
    words = r"different tensors.*: rank 1 has \[optimizer\.state.*, and rank 2 has \[none\]"
    all_say(lambda: checkpoint.save(net, folder / "given", stepped, process_group=group), words, group)
    assert not (folder / "given").exists()

    def full(path: Path) -> str:
        raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.disk, "digest", full if rank == 2 else writing.disk.digest)
        saving = checkpoint.save_async(net, folder / "1", step=4, process_group=group)
        saving._future.exception()
    with pytest.warns(CheckpointWarning, match=r"step-00000004 could not be saved.*rank 2: .*the disk is full"):
        checkpoint.save(net, folder / "1", step=5, process_group=group)


def _all(rank: int, folder: Path) -> None:
    everyone = dist.group.WORLD
    checkpoint.save(Net(1, 64, SMALL), folder / "whole", process_group=everyone)
    lpq.export(Net(1, 64, SMALL), folder / "whole.pt", layout="lpq", process_group=everyone)
    groups = [dist.new_group(ranks) for ranks in (ALONE, PAIR)]
    writers = [dist.new_group(ranks, backend="gloo") for ranks in (ALONE, PAIR)]
    lone = dist.new_group([1])
    mine = ALONE if rank in ALONE else PAIR
    group = groups[mine is PAIR]
    mesh = DeviceMesh.from_group(group, "cpu")
    _models_of_their_own(folder, lambda seed: shard(Net(seed, 64, SMALL), mesh))
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    _models_of_their_own(folder, lambda _: replicated, process_group=everyone)
    _each_by_itself(folder, mine, group, writers[mine is PAIR], mesh)
    if rank:
        _within_the_pair(rank, folder, writers[1], mesh)
    else:
        with pytest.raises(CheckpointError, match="process_group is to be a group that this process is in"):
            checkpoint.save(nn.Linear(2, 2), folder / "1", process_group=groups[1])
    if rank == 1:
        words = re.escape("a tensor lies over the ranks [1, 2], and the ranks that call this together are [1]")
        all_say(lambda: checkpoint.save(shard(Net(1, 64, SMALL), mesh), folder, process_group=lone), words, lone)


def test_three_ranks(tmp_path: Path) -> None:
    spawn(_all, 3, tmp_path)
