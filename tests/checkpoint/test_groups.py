"""Some of the ranks save and load together: whose model it is, and that all of them mean the same one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Net, model_differences, optimizer_differences, optimizer_of, shard
from ranks import all_say, spawn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning, writing
from lpq.checkpoint.agreeing import check_one_model

SMALL = {"tensor": "fp8", "mx": "mxfp8"}
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
            r"lies over the ranks \[3, 4\], and those that were called together are \[0, 1, 2, 3\]",
        ),
    ],
)
def test_ranks_have_one_model_if_its_tensors_join_them(meshes: Any, words: str | None) -> None:
    ranks: Any = SimpleNamespace(names=[0, 1, 2, 3])
    found = [frozenset(own) for own in meshes]
    if words is None:
        check_one_model(found, ranks)
    else:
        with pytest.raises(CheckpointError, match=words):
            check_one_model(found, ranks)


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
        words = re.escape("a tensor lies over the ranks [1, 2], and those that were called together are [1]")
        all_say(lambda: checkpoint.save(shard(Net(1, 64, SMALL), mesh), folder, process_group=lone), words, lone)


def test_three_ranks(tmp_path: Path) -> None:
    spawn(_all, 3, tmp_path)
