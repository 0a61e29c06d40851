"""Training under FSDP2 that is saved half-way, and that goes on from there on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpointed import as_bytes
from sharded import How, built, step
from torch import nn
from torch.distributed.tensor import DTensor

from lpq import checkpoint
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

RUNS: dict[str, dict[str, Any]] = {
    "delayed": {"recipe": "fp8-delayed"},
    "mixed": {"recipe": "fprop=mxfp8, dgrad=fp8-delayed, wgrad=bf16"},
    "ordinary": {"recipe": "fp8-current", "weights": None},
    "stored": {"recipe": "mxfp8", "weights": "quantized", "ranks": 4},
    "stored, tensor-wide": {"recipe": "fp8-current", "weights": "quantized", "ranks": 4},
    "masters": {"recipe": "fprop=mxfp8, dgrad=nvfp4(), wgrad=bf16", "weights": "quantized", "ranks": 4},
}
"""Runs in which ranks compute alike whatever their number: they see the same data."""


def _values(net: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of everything that is saved of a model, as bytes."""
    found = {}
    for name, tensor in net.state_dict().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, QuantizedTensor):
            for direction, operand in local.operands:
                found.update({f"{name}.{direction}.{n}": as_bytes(b) for n, b in operand.buffers().items()})
        else:
            found[name] = as_bytes(local)
    return found


def _made(name: str, **options: Any) -> tuple[How, nn.Module, torch.optim.Optimizer]:
    how = How(**RUNS[name], **options)
    net = built(how)
    assert any(".row.data" in part for part in _values(net)) == ("weights" in RUNS[name] and name != "ordinary")
    optimizer = how.optimizer(net.parameters())
    return how, net, MasterWeights(optimizer) if name == "masters" else optimizer


def uninterrupted(folder: Path, **options: Any) -> None:
    """Train without a pause; save after two steps, while the next are taken, and export the model after four."""
    for name in RUNS:
        how, net, optimizer = _made(name, **options)
        for number in range(4):
            if number == 2:
                saving = checkpoint.save_async(folder / name, net, optimizer, step=2, keep=1)
            step(net, optimizer, number, how)
        checkpoint.export_file(net, folder / f"{name}.pt")
        assert saving.wait() == folder / name / "step-00000002"


def resumed(folder: Path, *, used: bool, **options: Any) -> None:
    """Go on from the checkpoint; what becomes of the model is what became of it without the pause.

    ``used``: some models took a step of their own before, and have derived much from their weights.
    """
    for name in RUNS:
        how, net, optimizer = _made(name, **options)
        if used and name in ("delayed", "masters"):
            step(net, optimizer, 7, how)
        info = checkpoint.load(folder / name, net, optimizer)
        assert info.step == 2
        for number in range(info.step, 4):
            step(net, optimizer, number, how)
        truth = built(how)
        checkpoint.import_file(folder / f"{name}.pt", truth)
        found, expected = _values(net), _values(truth)
        assert found.keys() == expected.keys()
        assert [n for n in found if not torch.equal(found[n], expected[n])] == [], (name, options)
