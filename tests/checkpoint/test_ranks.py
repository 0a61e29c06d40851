"""Several ranks: what fails on one of them is the same error on all, soon, and nothing half-written counts."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed import Net, model_differences, optimizer_differences, optimizer_of, shard
from ranks import all_say, each_says, mesh_of, processes, spawn
from support.comparing import as_bytes
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Shard

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, saving, writing

SMALL = {"tensor": "fp8", "mx": "mxfp8"}


class Unspeakable(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("the disk is full")
        self.held = lambda: None


def _net(seed: int) -> nn.Module:
    return shard(Net(seed, 64, SMALL), mesh_of())


def _whole(folder: Path) -> None:
    """The first checkpoint is whole still, and is the one that is loaded."""
    net = _net(2)
    assert checkpoint.load(net, folder).step == 1
    assert model_differences(net, Net(1, 64, SMALL)) == {}


def _one_rank_raises_while_it_writes(rank: int, folder: Path) -> None:
    def refuse(*_: object) -> None:
        raise Unspeakable

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.disk, "digest", refuse if rank == 1 else writing.disk.digest)
        words = (
            "step-00000002 could not be saved, and those before it are as they were.*rank 1: Unspeakable: the disk is"
        )
        all_say(lambda: checkpoint.save(_net(2), folder, step=2), words)
        all_say(lambda: checkpoint.save_async(_net(2), folder, step=2).wait(), words)
    assert not [*folder.glob("*.partial")]
    _whole(folder)


def _one_rank_raises_before_it_writes(rank: int, folder: Path) -> None:
    net = _net(2)
    if rank == 1:
        net.plain.bias = nn.Parameter(torch.empty(7, device="meta"))
    all_say(lambda: checkpoint.save(net, folder, step=2), r"rank 1: plain\.bias is on the meta device")


def _ranks_disagree(rank: int, folder: Path) -> None:
    net = _net(2)
    lpq.set_step(net, 9 * rank)
    words = r"the ranks hold different layers, quantizers, recipes or steps.*rank 0 has \["
    all_say(lambda: checkpoint.save(net, folder, step=2), words)
    other = _net(2)
    if rank == 1:
        other.more = nn.Linear(3, 5, bias=False)
        other.plain.bias = nn.Parameter(torch.zeros(1 + len(other.plain.bias)))
    words = (
        r"the ranks hold different tensors, and a checkpoint is of one model: rank 0 has \[plain\.bias \[.*"
        r"and rank 1 has \[more\.weight \[5, 3\]\]"
    )
    for save in (checkpoint.save, checkpoint.save_async):
        all_say(lambda: save(other, folder, step=2), words)  # noqa: B023


def _one_rank_finds_damage(rank: int, folder: Path) -> None:
    """Each rank reads a share of the files only."""
    path, before = folder / "damaged", Net(2, 64, SMALL)
    checkpoint.save(_net(1), path)
    dist.barrier()
    for name in sorted(p.name for p in path.iterdir() if p.suffix == ".distcp"):
        raw = (path / name).read_bytes()
        dist.barrier()
        if rank == 0:
            (path / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        dist.barrier()
        net = _net(2)
        all_say(lambda: checkpoint.load(net, path), rf"{name}: its SHA-256 differs from its manifest")  # noqa: B023
        assert model_differences(net, before) == {}
        dist.barrier()
        if rank == 0:
            (path / name).write_bytes(raw)
        dist.barrier()
    checkpoint.load(net, path)


def _one_rank_finds_damage_in_one_file(rank: int, folder: Path) -> None:
    """Each rank reads a share of its records only."""
    path = lpq.export(_net(1), folder / "one.pt", layout="lpq").path
    raw = path.read_bytes()
    content = torch.load(path, weights_only=True)["model"]
    large = [as_bytes(tensor).numpy().tobytes() for tensor in content.values() if tensor.nbytes >= 100]
    assert len(large) >= 4
    finders, before = set(), Net(2, 64, SMALL)
    for data in large:
        dist.barrier()
        if rank == 0:
            at = raw.index(data) + 50
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        dist.barrier()
        net = _net(2)
        words = r"it is damaged or was changed since it was saved \(BadZipFile\)"
        finders.add(all_say(lambda: checkpoint.import_file(net, path), words).partition("rank ")[2][:1])  # noqa: B023
        assert model_differences(net, before) == {}
    assert finders == {"0", "1"}
    dist.barrier()
    if rank == 0:
        path.write_bytes(raw)
    dist.barrier()
    checkpoint.import_file(net, path)
    assert model_differences(net, Net(1, 64, SMALL)) == {}


def _one_rank_has_another_model(rank: int, folder: Path) -> None:
    formats = SMALL if rank == 0 else {**SMALL, "mx": "nvfp4"}
    net = shard(Net(2, 64, formats), mesh_of())
    words = r"rank 1: stored\.mx\.weight was saved as mxfp8, and the model stores it as nvfp4"
    all_say(lambda: checkpoint.load(net, folder / "step-00000001"), words)
    assert model_differences(net, Net(2, 64, formats)) == {}


def _training_goes_on_while_it_is_written(rank: int, folder: Path) -> None:
    """And talks over the same group as before, at the same time."""
    net = _net(1)
    optimizer = optimizer_of(net, 1)
    slow, real = time.sleep, writing.disk.digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.disk, "digest", lambda path: (slow(0.5), real(path))[1])
        begun = checkpoint.save_async(net, folder / "async", optimizer, step=4, extra={"rank": rank})
        assert not begun.done()
        other = _net(2)
        with torch.no_grad():
            for tensor, value in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
                tensor.copy_(value)
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        tensor.zero_()
        for i in range(50):
            total = torch.tensor([rank + i])
            dist.all_reduce(total)
            assert total == 1 + 2 * i
        assert not (folder / "async" / "step-00000004").exists()
        assert begun.wait() == folder / "async" / "step-00000004"
    fresh = _net(2)
    optimizer = optimizer_of(fresh, None)
    assert checkpoint.load(fresh, folder / "async", optimizer).extra == {"rank": 0}
    truth = Net(1, 64, SMALL)
    assert model_differences(fresh, truth) == {}
    assert optimizer_differences(optimizer, optimizer_of(truth, 1)) == {}


def _saving_that_cannot_begin_leaves_no_group(rank: int, folder: Path) -> None:
    groups = len(distributed_c10d._world.pg_map)
    net = _net(1)
    made = []

    def refuse(*_: object, process_group: dist.ProcessGroup, **options: object) -> None:
        made.append(len(distributed_c10d._world.pg_map))
        dist.barrier(process_group)  # else one rank ends the group while another one is connecting
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.dcp, "async_save", refuse)
        with pytest.raises(CheckpointError, match=r"could not be saved.*can't start new thread"):
            checkpoint.save_async(net, folder / "unbegun")
    assert made[0] > groups
    assert len(distributed_c10d._world.pg_map) == groups


def _ranks_remember_differently(rank: int, folder: Path) -> None:
    """They saw other inputs: as after a step, the largest amax of all of them counts."""
    net = _net(1)
    net.remembering.x_amax_history.copy_(torch.tensor([1.0, 2.0, 0.0, rank]) if rank else torch.tensor([5.0, 0, 0, 0]))
    checkpoint.save(net, folder / "memories")
    checkpoint.load(net, folder / "memories")
    assert net.remembering.x_amax_history.tolist() == [5.0, 2.0, 0.0, 1.0]


def _quantized_of_a_checkpoint_in_high_precision(rank: int, folder: Path) -> None:
    """Weights saved unquantized are encoded with the statistics of the whole weight, found from the mesh."""
    layer = nn.Sequential(nn.Linear(64, 128, bias=False, dtype=torch.bfloat16))
    values = torch.randn(128, 64, generator=torch.Generator().manual_seed(3))
    values[100, 5] = 1000.0  # on the last rank
    with torch.no_grad():
        layer[0].weight.copy_(values)
    mesh = mesh_of()
    checkpoint.save(shard(layer, mesh), folder / "plain")
    for text in ("fp8", "nvfp4", "mxfp8", "hybrid(row=fp8, col=nvfp4)"):
        quantizer = lpq.quantizer(text)
        stored = nn.Sequential(nn.Linear(64, 128, bias=False))
        stored[0].weight = nn.Parameter(quantizer.quantize(torch.zeros(128, 64).bfloat16()), requires_grad=False)
        shard(stored, mesh)
        checkpoint.load(stored, folder / "plain")
        truth = nn.Sequential(nn.Linear(64, 128, bias=False))
        truth[0].weight = nn.Parameter(quantizer.quantize(values.bfloat16()), requires_grad=False)
        assert model_differences(stored, truth) == {}, text
        local = quantizer.quantize(values.bfloat16()[64 * rank :][:64])
        if text == "fp8" and rank == 0:  # without the group the ranks would differ
            assert local.row.scale != truth[0].weight.row.scale


def _shards_that_cut_blocks_are_refused(rank: int, folder: Path) -> None:
    mesh = mesh_of()
    local = lpq.quantizer("mxfp8").quantize(torch.zeros(48, 32))  # 48 rows a rank: one block and a half
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([96, 32]), stride=(32, 1))
    net = nn.Linear(32, 96, bias=False)
    net.weight = nn.Parameter(made, requires_grad=False)
    all_say(lambda: checkpoint.save(net, folder / "cut"), "the shards cut blocks of the format")


def _ranks_write_to_different_places(rank: int, folder: Path) -> None:
    """Each would write its own part, and neither place would have a whole checkpoint."""
    target = folder / "places"
    places = ", and ".join(rf"rank {r} has \[{target / str(r) / 'step-00000002'}\]" for r in range(2))
    words = rf"the ranks were given different paths: {places}\. Pass the same"
    each_says(lambda: checkpoint.save(_net(2), target / str(rank), step=2), words)
    assert not target.exists()


def _own_disks(rank: int, folder: Path, name: str, change: Callable[[Path], None]) -> Path:
    """A checkpoint at the same relative path on the disk of each rank; the second rank's is changed."""
    own = folder / f"own-{name}" / str(rank)
    shutil.copytree(folder / "step-00000001", own / "run" / "step-00000001")
    if rank == 1:
        change(own / "run" / "step-00000001")
    os.chdir(own)
    return Path("run")


def _ranks_are_given_different_paths(rank: int, folder: Path) -> None:
    net = _net(2)
    words = "cannot be loaded: the ranks were given different paths: "
    each_says(lambda: checkpoint.load(net, folder / ("step-00000001", "nowhere")[rank]), words)
    assert model_differences(net, Net(2, 64, SMALL)) == {}
    checkpoint.load(net, folder / "step-00000001")
    layers = shard(lpq.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current"), mesh_of())
    files = [folder / f"path-{number}" for number in range(2)]
    for file in files:
        lpq.export(net, file, layout="lpq")
    words = "the ranks were given different paths: rank 0 has .*path-0"
    each_says(lambda: checkpoint.import_file(net, files[rank]), words)  # both are there, and would be mixed
    for layout in ("lpq", "compressed-tensors"):
        each_says(lambda: lpq.export(layers, folder / f"path-{rank}" / "new", layout=layout), words)  # noqa: B023
    words = r"rank 0 has \[.*one in the layout lpq\], and rank 1 has \[.*one in the layout {}\]"
    each_says(lambda: lpq.export(layers, folder / "one", layout="lpq", decode=rank == 1), words.format("lpq, decoded"))
    layout = ("lpq", "compressed-tensors")[rank]
    each_says(lambda: lpq.export(layers, folder / "one", layout=layout), words.format("compressed-tensors"))
    assert not (folder / "one").exists()


def _ranks_call_different_functions(rank: int, folder: Path) -> None:
    """Each would wait for the others until half the timeout, or be in another collective than they."""
    net = _net(2)
    saved = folder / "step-00000001"
    for other in (lambda: checkpoint.load(net, saved), lambda: checkpoint.save_async(net, folder / "other")):
        words = r"rank \d (saves|loads|saves in the background) a model that the ranks 0, 1 share.* and another one of"
        each_says(lambda: other() if rank else checkpoint.save(net, folder / "other"), words)  # noqa: B023
    assert not (folder / "other").exists()


def _one_rank_lacks_a_file(rank: int, folder: Path) -> None:
    """Each rank digests some of the files and reads others, and all of them raise in any case."""
    here = Path.cwd()
    for name in ("index.json", "__0_0.distcp", "__1_0.distcp", "extra.pt", "lpq.json"):
        path = _own_disks(rank, folder, name, lambda at: (at / name).unlink())  # noqa: B023
        net = _net(2)
        if "partly overwritten" not in all_say(lambda: checkpoint.load(net, path), name):  # noqa: B023
            assert model_differences(net, Net(2, 64, SMALL)) == {}
        os.chdir(here)


def _one_rank_encodes(rank: int, folder: Path) -> None:
    """The first rank loads, and the other does not: its file or its model is another. That would take a reduction."""
    mesh = mesh_of()

    def plain() -> nn.Module:
        return shard(nn.Sequential(nn.Linear(64, 128, bias=False)), mesh)

    def stored() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 128, bias=False))
        net[0].weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.zeros(128, 64)), requires_grad=False)
        return shard(net, mesh)

    for name, made in (("plain", plain()), ("stored", stored())):
        lpq.export(made, folder / f"{name}.pt", layout="lpq")
    dist.barrier()
    own, here = folder / f"own-file-{rank}", Path.cwd()
    own.mkdir()
    shutil.copy(folder / f"{('plain', 'stored')[rank]}.pt", own / "one.pt")
    os.chdir(own)
    words = "cannot be imported: the ranks read different files, or hold different models"
    each_says(lambda: checkpoint.import_file(stored(), "one.pt"), words)
    os.chdir(here)
    words = "the ranks hold different models, and the file is of one"
    all_say(lambda: lpq.export(plain() if rank else stored(), folder / "mixed.pt", layout="lpq"), words)
    assert not (folder / "mixed.pt").exists()
    checkpoint.save(plain(), folder / "unstored")
    words = "the ranks read different files under that name, or hold different models"
    all_say(lambda: checkpoint.load(plain() if rank else stored(), folder / "unstored"), words)


Check = Callable[[int, Path], None]


def _after_a_save(rank: int, check: Check, folder: Path) -> None:
    checkpoint.save(_net(1), folder, step=1)
    check(rank, folder)


@pytest.mark.parametrize(
    "check",
    [
        _one_rank_raises_while_it_writes,
        _one_rank_raises_before_it_writes,
        _ranks_disagree,
        _one_rank_finds_damage,
        _one_rank_finds_damage_in_one_file,
        _one_rank_has_another_model,
        _training_goes_on_while_it_is_written,
        _saving_that_cannot_begin_leaves_no_group,
        _ranks_remember_differently,
        _quantized_of_a_checkpoint_in_high_precision,
        _shards_that_cut_blocks_are_refused,
        _ranks_write_to_different_places,
        _ranks_are_given_different_paths,
        _ranks_call_different_functions,
        _one_rank_lacks_a_file,
        _one_rank_encodes,
    ],
)
def test_two_ranks(check: Check, tmp_path: Path) -> None:
    spawn(_after_a_save, 2, check, tmp_path)


def _one_rank_is_killed(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    checkpoint.save(_net(1), folder, step=1)
    if rank == 1:
        writing.disk.digest = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoint.save(_net(2), folder, step=2)
    except CheckpointError as error:
        (folder / "said").write_text(str(error))


def test_a_rank_that_is_killed_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    started = processes(_one_rank_is_killed, 2, tmp_path, join=False)
    survivor, victim = started.processes  # nobody ends the survivor: it must find out
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    survivor.join(60)
    assert survivor.exitcode == 0
    assert "step-00000002 could not be saved, and those before it" in (tmp_path / "said").read_text()
    net = Net(2, 64, SMALL)
    assert not [*tmp_path.glob("*.partial")]
    assert checkpoint.load(net, tmp_path).step == 1
    assert model_differences(net, Net(1, 64, SMALL)) == {}
