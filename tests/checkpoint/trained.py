"""Training under FSDP2 that is saved half-way, and that goes on from there on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpointed import differences
from sharded import How, built, bytes_of, local, step
from torch import Tensor, nn

import lpq
from lpq import checkpoint
from lpq.optim import MasterWeights

WEIGHTS = [
    "fp8(scaling=block, block=128x128)", "mxfp8()", "hybrid(row=fp8, col=nvfp4)", "mxfp4()",
    "fp8(scaling=row)", "nvfp4(block=16x16)", "hybrid(row=nvfp4, col=mxfp8, col_source=row)",
    "hybrid(row=fp8(scaling=delayed, history=4), col=mxfp4)",
]  # fmt: skip
"""Formats of a model's layers: the first, and every other, has rows for the largest blocks on each of four ranks."""


def _many(*weights: str) -> dict[str, Any]:
    """A model with a layer for each of these weights, whose inputs and gradients remember amaxes."""
    layers = [f"{i // 2}.{('up', 'down')[i % 2]}" for i in range(len(weights))]
    delayed = "fp8(scaling=delayed, history=4)"
    rules = [
        {"match": layer, "recipe": f"x={delayed}, w={weight}, dy={delayed}"}
        for layer, weight in zip(layers, weights, strict=True)
    ]
    return {"blocks": len(weights) // 2, "ranks": 4, "recipe": {"rules": rules}}


RUNS: dict[str, dict[str, Any]] = {
    "ordinary": {"recipe": "fp8-delayed", "weights": None, "blocks": 1},
    "gathered": _many(*WEIGHTS[4:]),
    "stored": {**_many(*WEIGHTS[:4]), "weights": "quantized"},
    "masters": {**_many(*WEIGHTS[4:]), "weights": "quantized"},
}
"""Runs in which ranks compute alike whatever their number: they see the same data."""
SAVED, LAST = 2, 3
Runs = Mapping[str, dict[str, Any]]


def _state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state of each parameter, masters included."""
    kept = optimizer.state_dict()["state"]
    return {f"{i}.{name}": tensor for i, state in kept.items() for name, tensor in state.items()}


def _made(run: dict[str, Any], name: str, **options: Any) -> tuple[How, nn.Module, torch.optim.Optimizer]:
    how = How(**run, width=128, **options)
    net = built(how)
    assert any(".row.data" in part for part in bytes_of(net)) == (how.weights == "quantized")
    optimizer = how.optimizer(net.parameters())
    return how, net, MasterWeights(optimizer, keep=name == "masters") if how.weights == "quantized" else optimizer


def _write_down(folder: Path, name: str, number: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All there is of a run after a step; of the optimizer, without lpq, each rank writes what it has."""
    lpq.export(net, folder / f"{name}-{number}.pt", layout="lpq")
    shards = {key: local(tensor).cpu() for key, tensor in _state(optimizer).items()}
    assert any(key.endswith(".master") for key in shards) == (name == "masters")
    torch.save(shards, folder / f"{name}-{number}-rank{dist.get_rank()}.pt")


def _is_as_written_down(
    folder: Path, name: str, number: int, net: nn.Module, optimizer: torch.optim.Optimizer, truth: nn.Module
) -> None:
    """``truth``: a model to load into."""
    checkpoint.import_file(truth, folder / f"{name}-{number}.pt")
    found, expected = bytes_of(net), bytes_of(truth)
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n], expected[n])] == [], (name, number)
    files = sorted(folder.glob(f"{name}-{number}-rank*.pt"))
    shards = [torch.load(file, weights_only=True) for file in files]
    state = _state(optimizer)
    assert state.keys() == shards[0].keys()
    for key, tensor in state.items():
        parts = [shard[key] for shard in shards]
        whole = torch.cat(parts) if parts[0].dim() else parts[0]
        assert differences(tensor, whole.to(tensor.device)) == [], (name, number, key)


def uninterrupted(
    folder: Path, saved: str, runs: Runs = RUNS, begin: Callable[[nn.Module], None] | None = None, **options: Any
) -> None:
    """Train without a pause. Save into ``folder/saved`` after two steps, while the next are taken.

    ``begin``: what is done to a model before.
    """
    for name, run in runs.items():
        how, net, optimizer = _made(run, name, **options)
        if begin is not None:
            begin(net)
        for number in range(LAST):
            if number == SAVED:
                saving = checkpoint.save_async(net, folder / saved / name, optimizer, step=number, keep=1)
                _write_down(folder, name, number, net, optimizer)
            step(net, optimizer, number, how)
        _write_down(folder, name, LAST, net, optimizer)
        assert saving.wait() == folder / saved / name / f"step-{SAVED:08}"


def resumed(
    folder: Path, source: str, then: str | None = None, runs: Runs = RUNS, *, used: bool = False, **options: Any
) -> None:
    """Go on from ``folder/source``: what was saved is there, and what becomes of it is what did without the pause.

    ``then``: save it again, before that, for others to go on from. ``used``: some models took a step of their own
    before, and have derived much from their weights.
    """
    for name, run in runs.items():
        how, net, optimizer = _made(run, name, **options)
        if used and name in ("gathered", "masters"):
            step(net, optimizer, 7, how)
        before = bytes_of(net)
        info = checkpoint.load(net, folder / source / name, optimizer)
        assert (info.step, info.policy) == (SAVED, lpq.policy(how.recipe))
        assert [n for n, t in bytes_of(net).items() if not torch.equal(t, before[n])], "there was nothing to load"
        truth = built(how)
        _is_as_written_down(folder, name, SAVED, net, optimizer, truth)
        if then is not None:
            checkpoint.save(net, folder / then / name, optimizer, step=SAVED)
        for number in range(SAVED, LAST):
            step(net, optimizer, number, how)
        _is_as_written_down(folder, name, LAST, net, optimizer, truth)
