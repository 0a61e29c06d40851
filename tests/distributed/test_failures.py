"""When something goes wrong: a rank that raises ends the others in time; what cannot be done is refused in words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import gathered, watched
from ranks import fully_shard, on_ranks, processes
from sharded import SMALL, How, batch, built, optimizer_for, same_weights, step, trained
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Optimizer

import lpq
from lpq.checkpoint import writing
from lpq.core import QuantizedTensor
from lpq.distributed import cast_master_weights
from lpq.distributed.gather_unit import Unit
from lpq.distributed.shard import WeightShard
from lpq.operations import reduce_statistics
from lpq.optim import MasterWeights

TIMEOUT = 3
"""Seconds, of the process group, once the ranks work together."""
GROUPS = 4
"""So many pairs of ranks share the mishaps, since they do little but wait; the last has the one that kills."""


# ---------------------------------------------------------------------------------- a rank that raises


class Mishap(Exception):
    """An error on one rank."""


def _fail(*_: Any, **__: Any) -> None:
    raise Mishap


@dataclass
class Run:
    """A rank's model and optimizer."""

    how: How
    net: nn.Sequential
    optimizer: Optimizer
    folder: Path

    def step(self) -> None:
        step(self.net, self.optimizer, 1, self.how)

    def cast(self) -> None:
        """Masters that the ranks share out, as in ZeRO."""
        weight = lpq.quantizer("nvfp4").quantize(torch.zeros(64, 64))
        start = 1001 * dist.get_rank()
        master = torch.ones(1001 if start == 0 else 64 * 64 - start)
        cast_master_weights([weight], [master], [start], dist.group.WORLD)

    def save(self) -> None:
        lpq.checkpoint.save(self.net, self.folder / "run", self.optimizer, step=2)


def _in_forward(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.net[1].down.register_forward_pre_hook(_fail)


def _in_a_gather(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unit, "begin_all", _fail)


def _in_backward(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.net[0].register_forward_hook(lambda module, args, output: output.register_hook(_fail) and None)


def _in_the_optimizer(run: Run, patch: pytest.MonkeyPatch) -> None:
    inner = run.optimizer.optimizer if isinstance(run.optimizer, MasterWeights) else run.optimizer
    inner.register_step_pre_hook(_fail)


def _in_a_reduction(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dist, "all_reduce", _fail)
    patch.setattr(reduce_statistics, "all_reduce", _fail)


def _in_a_save(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writing.disk, "digest", _fail)


def _before_a_save(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lpq.checkpoint, "save", _fail)


def _vanish(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.net[1].down.register_forward_pre_hook(lambda *_: os._exit(7))


Spoil = Callable[[Run, pytest.MonkeyPatch], None]
MISHAPS: dict[str, tuple[str, Callable[[Run], None], Spoil]] = {
    "forward": ("high_precision", Run.step, _in_forward),
    "a gather": ("high_precision", Run.step, _in_a_gather),
    "backward": ("high_precision", Run.step, _in_backward),
    "the optimizer": ("high_precision", Run.step, _in_the_optimizer),
    "the optimizer of masters": ("quantized", Run.step, _in_the_optimizer),
    "the reduction after a step": ("high_precision", Run.step, _in_a_reduction),
    "the reduction of masters": ("quantized", Run.step, _in_a_reduction),
    "the reduction of stored weights": ("quantized, without masters", Run.step, _in_a_reduction),
    "the reduction of a cast": ("quantized", Run.cast, _in_a_reduction),
    "a save": ("quantized", Run.save, _in_a_save),
    "what comes before a save": ("quantized", Run.save, _before_a_save),
    "killed": ("high_precision", Run.step, _vanish),
}


def _meet(folder: str, name: str, ranks: int) -> None:
    """Wait until every rank was here; not by the means that are about to fail."""
    (Path(folder) / name).touch()
    while len(list(Path(folder).glob(f"{name.partition('-')[0]}-*"))) < ranks:
        time.sleep(0.05)


def _unlucky(process: int, ranks: int, folder: str) -> None:
    """Rank 1 raises in its second step, and lives on without a word; how long do the others wait?"""
    torch.set_num_threads(1)
    group, rank = divmod(process, ranks)
    for number, (place, (weights, work, spoil)) in list(enumerate(MISHAPS.items()))[group::GROUPS]:
        _meet(folder, f"begin{number}-{rank}", ranks)
        store = dist.FileStore(f"{folder}/store{number}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        how = How("fp8-current", weights=weights.partition(",")[0], width=64, inner=64)
        net = built(how)
        optimizer: Optimizer = AdamW(net.parameters())
        if how.weights == "quantized":
            optimizer = MasterWeights(optimizer, keep=weights == how.weights)
        run = Run(how, net, optimizer, Path(folder))
        run.step()
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                spoil(run, patch)
            start = time.monotonic()
            said = "nothing"
            try:
                work(run)
            except Exception as error:
                said = type(error).__name__
            ended = time.monotonic() - start
        name = f"{number}-{rank}"
        (Path(folder) / f"said{name}").write_text(f"{said} {ended}")
        if place == "killed":
            break
        _meet(folder, f"end{name}", ranks)
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort the interpreter's own way out


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    ranks = 2
    started = processes(_unlucky, GROUPS * ranks, ranks, str(tmp_path), join=False).processes
    for process in started:
        process.join(60 + 3 * TIMEOUT * len(MISHAPS))
    hangs = [process.is_alive() for process in started]
    for process in started:
        process.kill()
    assert not any(hangs)
    assert [process.exitcode for process in started] == [0] * (GROUPS * ranks - 1) + [7]
    for number, place in enumerate(MISHAPS):
        told = place == "a save"  # there an error of one rank is told to the others
        if place != "killed":
            said, _ = (tmp_path / f"said{number}-1").read_text().split()
            assert said == ("CheckpointError" if told else "Mishap"), place
        said, ended = (tmp_path / f"said{number}-0").read_text().split()
        print(place, said, ended)
        assert said in (["CheckpointError"] if "save" in place else ["RuntimeError", "DistBackendError"]), (place, said)
        assert float(ended) < TIMEOUT + 5, place
        if not told and place != "killed":
            assert float(ended) > TIMEOUT / 2, f"{place}: it ended before rank 1 could be missed"


# ---------------------------------------------------------------------------------- recipes that change

CHANGES = {
    "rules": [
        {"match": "0.up", "recipe": "skip", "until": 1},
        {"match": "0.up", "recipe": "fp8-current", "until": 3},
        {"match": "0.up", "recipe": "x=mxfp8(), w=nvfp4(), dy=mxfp8()"},
        {"match": "*.up", "recipe": "fp8-delayed", "until": 2},
        {"match": "*.up", "recipe": "skip", "until": 4},
        {"match": "*.up", "recipe": "fp8-block"},
        {"match": "0.down", "recipe": "mxfp8", "until": 5},
        {"match": "*", "recipe": "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "until": 4},
        {"match": "*", "recipe": "bf16"},
    ]
}


def _run(how: How, steps: int = 6) -> tuple[list[float], nn.Sequential, list[set[str]]]:
    net = built(how)
    optimizer = optimizer_for(how, net)
    losses, kinds = [], []
    for number in range(steps):
        lpq.set_step(net, number)
        seen: set[str] = set()
        with watched(net, lambda name, when, weight, seen=seen: _note(seen, name, weight)):
            losses.append(step(net, optimizer, number, how))
        kinds.append(seen)
    return losses, net, kinds


def _note(seen: set[str], name: str, weight: Tensor) -> None:
    if isinstance(weight, QuantizedTensor):
        seen.add(f"{name}: {weight.quantizer}")


@on_ranks(2)
def test_recipes_change(rank: int) -> None:
    """Between steps; the model trains as with gathers in high precision."""
    ways: list[dict[str, Any]] = [{"checkpoint": True}, {"accumulate": 2, "reshard": False}]
    for way in ways:
        how = How(CHANGES, width=128, inner=256, **way)
        ordinary, a, none = _run(replace(how, weights=None, checkpoint=False, reshard=True))
        losses, b, kinds = _run(how)
        assert ordinary == losses, way
        same_weights(a, b, way)
        assert none == [set()] * 6
        if "checkpoint" not in way:
            first = [[kind for kind in seen if kind.startswith("0.up")] for seen in kinds]
            assert first == [[], *[["0.up: fp8"]] * 2, *[["0.up: nvfp4"]] * 3]


@on_ranks(2)
def test_not_while_a_gradient_is_accumulated(rank: int) -> None:
    for number in (1, 3):  # from no recipe to fp8, and from fp8 to nvfp4
        how = How(CHANGES, **SMALL)
        net = built(how)
        lpq.set_step(net, number - 1)
        step(net, AdamW(net.parameters()), 0, how)
        net.set_requires_gradient_sync(False)
        net(batch(0, how)).square().mean().backward()
        lpq.set_step(net, number)
        with pytest.raises(RuntimeError, match=r"recipe .* changed while its gradient is being accumulated.*between"):
            net(batch(1, how))


@on_ranks(2)
def test_a_stored_weight_keeps_its_format(rank: int) -> None:
    changing = {"rules": [{"match": "*", "recipe": "fp8-current", "until": 1}, {"match": "*", "recipe": "mxfp8"}]}
    words = r"0\.up: its weight would be stored quantized, and the policy changes"
    with pytest.raises(lpq.recipes.RecipeError, match=words):
        built(How(changing, weights="quantized", **SMALL))
    how = How("fp8-current", weights="quantized", **SMALL)
    net = built(how)
    step(net, optimizer_for(how, net), 0, how)
    net[0].up.recipe = "mxfp8"
    with pytest.raises(ValueError, match=r"is stored as fp8 and its recipe wants mxfp8: .* keeps its format"):
        net(batch(1, how))


# ---------------------------------------------------------------------------------- what is refused


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


COLUMNS = How("fp8-current", **SMALL)


@on_ranks(2)
def test_along_columns(rank: int) -> None:
    def shard(weights: Any) -> nn.Module:
        net = lpq.convert(_layers(), "fp8-current", weights=weights)
        return fully_shard(net, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)

    net, ordinary = shard("high_precision"), shard(None)
    words = "in high precision: it is sharded by S(1), and quantized weights are sharded along dimension 0"
    words = words.replace("S(1)", str(Shard(1)))
    assert [entry.note for entry in lpq.report(net).weights] == [words] * 2
    losses = [trained(COLUMNS, net=one).losses for one in (net, ordinary)]
    assert losses[0] == losses[1]
    same_weights(net, ordinary)
    assert [entry.note for entry in lpq.report(net).weights] == [words] * 2
    stored = shard("quantized")
    with pytest.raises(ValueError, match=r"is stored as fp8 and cannot be gathered so: it is sharded by .*dimension 0"):
        stored(torch.randn(32, 64))


@on_ranks(2)
def test_a_weight_of_its_own(rank: int) -> None:
    """Somebody puts another parameter in the place of a converted one: it is gathered as it is, and that is said."""
    net = lpq.convert(_layers(), "fp8-current", weights="high_precision")
    assert isinstance(net[0].weight.data, WeightShard)
    net[0].weight = nn.Parameter(torch.randn(128, 64))
    fully_shard(net)
    notes = [entry.note for entry in lpq.report(net).weights]
    assert notes[0] == "in high precision: the weight was replaced after lpq.convert"
    assert notes[1].startswith("gathered as fp8")
    found = gathered(net, torch.randn(32, 64))
    assert set(found["0", "forward"]) == {"values"}
    assert set(found["2", "forward"]) == {"data", "scale"}


@on_ranks(4)
def test_four_ranks(rank: int) -> None:
    for weights in ("high_precision", "quantized"):
        net = lpq.convert(_layers(), "fp8-current", weights=weights)
        fully_shard(net, reshard_after_forward=2)
        with pytest.raises(
            ValueError, match=r"layer \S+, .*reshard_after_forward=…\) with a number of ranks.*use True or False"
        ):
            net(torch.randn(32, 64))
