"""What saving costs a training, and whether what was saved loads on other numbers of ranks, to the bit.

    torchrun --nproc-per-node 4 -m benchmarks.saving FOLDER save
    torchrun --nproc-per-node 2 -m benchmarks.saving FOLDER load save    on to another number of ranks
    torchrun --nproc-per-node 1 -m benchmarks.saving FOLDER load

Each adds a row to the results: the number of ranks, the seconds of each save, what steps lose while one is written, and
a digest of all weights, states of formats and moments, which is the same before a save and after each load.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from benchmarks import stored
from benchmarks.llama import rotations
from benchmarks.shapes import TINY, Stack
from benchmarks.stack import group, sharded
from lpq.bench import machine
from lpq.bench.contenders import by_recipes

SAVED = Stack(blocks=4, hidden=2048, ffn=8192)
STEM = "saving"
STEPS = 8


def measured(folder: Path, doing: Sequence[str], recipe: str, shape: Stack, device: torch.device) -> dict[str, Any]:
    """Train a little, and save or load as ``doing`` says."""
    (contender,) = by_recipes((recipe,), weights="high_precision")
    model = sharded(contender, shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    found: dict[str, Any] = {"ranks": dist.get_world_size(), "did": [*doing], "recipe": recipe}
    if "load" in doing:
        found["step"] = lpq.checkpoint.load(model, folder, optimizer).step
        found["loaded"] = digest(model, optimizer)
    step = _step(model, optimizer, shape, device)
    if "save" in doing:
        before = [step() for _ in range(STEPS)]
        found["saved"] = digest(model, optimizer)
        number = int(found.get("step", 0)) + STEPS
        start = time.perf_counter()
        lpq.checkpoint.save(model, folder, optimizer, step=number)
        found["save_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        saving = lpq.checkpoint.save_async(model, folder.with_name(f"{folder.name}-async"), optimizer, step=number)
        found["returned_after_seconds"] = time.perf_counter() - start
        meanwhile = [step() for _ in range(4 * STEPS)]  # as many on all ranks
        saving.wait()
        found["written_after_seconds"] = time.perf_counter() - start
        usual = statistics.median(before)
        found |= {"step_ms": usual * 1e3, "lost_meanwhile_ms": (sum(meanwhile) - len(meanwhile) * usual) * 1e3}
    return found


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all tensors, whole, by their names."""
    state = hashlib.sha256()
    for name, tensor in (*model.state_dict().items(), *_moments(model, optimizer)):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state.update(name.encode())
        state.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            yield f"{name}.{key}", value


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: Stack, device: torch.device
) -> Callable[[], float]:
    """A step of training, which returns its seconds."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, dtype=torch.bfloat16)
    cos, sin = rotations(shape, device, torch.bfloat16)

    def step() -> float:
        start = time.perf_counter()
        model(x, cos, sin).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a row to the rows of earlier runs, and print all rows."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path)
    parser.add_argument("doing", nargs="+", choices=("save", "load"))
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--out", type=Path, default=stored.FOLDER, help="where the results go; default: %(default)s")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with group():
        shape = SAVED if device.type == "cuda" else TINY
        found = measured(options.folder, options.doing, options.recipe, shape, device)
        if dist.get_rank() == 0:
            stored.show(keep(options.out, found, shape))
    return 0


def keep(out: Path, found: dict[str, Any], shape: Stack) -> dict[str, Any]:
    """Store a run behind those that are there already."""
    before: dict[str, Any] = stored.load(out).get(STEM, {}) if out.exists() and any(out.glob("*.json")) else {}
    record = before.get("environment") or machine.record("python -m benchmarks.saving", ranks=found["ranks"])
    rows = [*before.get("results", ()), found]
    record["command"] = "; ".join(
        f"torchrun --nproc-per-node {row['ranks']} -m benchmarks.saving FOLDER {' '.join(row['did'])}" for row in rows
    )
    return stored.save(out, STEM, record, {**asdict(shape), "results": rows})


if __name__ == "__main__":
    sys.exit(main())
