"""What saving costs a training, and whether what was saved loads on other numbers of ranks, to the bit.

    torchrun --nproc-per-node 4 -m benchmarks.saving FOLDER save
    torchrun --nproc-per-node 2 -m benchmarks.saving FOLDER load save    on to another number of ranks
    torchrun --nproc-per-node 1 -m benchmarks.saving FOLDER load
    torchrun --nproc-per-node 8 -m benchmarks.saving FOLDER save-async --model 8b --checkpointing selective
    torchrun --nproc-per-node 4 -m benchmarks.saving FOLDER load --model 8b --checkpointing selective

``save`` saves while training waits, and again, beside FOLDER, while it goes on; ``save-async`` does the latter alone.
Each run adds a row to the results: the number of ranks, the seconds of each save, what steps lose while one is written,
and a digest of all weights, states of formats and moments, which is the same before a save and after each load.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import lpq
from benchmarks import environment, huggingface, recomputing, stored
from benchmarks.llama import rotations
from benchmarks.rows import Row
from benchmarks.shapes import MODELS, Decoder, Stack, tiny
from benchmarks.stack import group, meeting, sharded, told
from lpq.bench.contenders import by_recipes

SAVED = Stack(blocks=4, hidden=2048, ffn=8192)
STEM = "saving"
STEPS = 8
SOME = 2**24
"""Elements that are digested at once."""
MIXERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers that spread bits over 64."""


def measured(
    folder: Path, doing: Sequence[str], recipe: str, shape: Stack | Decoder, device: torch.device,
    checkpointing: str = recomputing.NONE,
) -> Row:  # fmt: skip
    """Train a little, and save or load as ``doing`` says."""
    peers = meeting(device)
    (contender,) = by_recipes((recipe,), weights="high_precision")
    if isinstance(shape, Decoder):
        model = huggingface.made(contender, shape, checkpointing, device)
        loss = huggingface.loss_of(model, shape, device)
    else:
        model = sharded(contender, shape, device)
        loss = _loss_of(model, shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    found: Row = {"ranks": dist.get_world_size(), "did": [*doing], "recipe": recipe}
    if "load" in doing:
        start = time.perf_counter()
        found["step"] = lpq.checkpoint.load(model, folder, optimizer).step
        found["load_seconds"] = time.perf_counter() - start
        found["loaded"] = digest(model, optimizer)
    if not {"save", "save-async"} & {*doing}:
        return found
    step = _step(loss, optimizer, device)
    usual = statistics.median([step() for _ in range(STEPS)])
    found |= {"saved": digest(model, optimizer), "step_ms": usual * 1e3}
    number = int(found.get("step", 0)) + STEPS
    if "save" in doing:
        start = time.perf_counter()
        lpq.checkpoint.save(model, folder, optimizer, step=number)
        found["save_seconds"] = time.perf_counter() - start
        folder = folder.with_name(f"{folder.name}-async")
    start = time.perf_counter()
    saving = lpq.checkpoint.save_async(model, folder, optimizer, step=number)
    found["returned_after_seconds"] = time.perf_counter() - start
    meanwhile = []
    while not all(told(peers, saving.done())):  # as many steps on all ranks, and until it is written on the last one
        meanwhile.append(step())
    saving.wait()
    found["written_after_seconds"] = time.perf_counter() - start
    found["steps_meanwhile"] = len(meanwhile)
    return found | {"lost_meanwhile_ms": (sum(meanwhile) - len(meanwhile) * usual) * 1e3}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all tensors by their names: each bit and its place count, and not how ranks share tensors out."""
    tensors = (*model.state_dict().items(), *_moments(model, optimizer))
    first = dist.get_rank() == 0
    sums = [
        _mixed(tensor) if isinstance(tensor, DTensor) or first else torch.zeros((), dtype=torch.int64)
        for _, tensor in tensors
    ]
    device = next(model.parameters()).device
    whole = torch.stack([one.to(device) for one in sums])
    dist.all_reduce(whole)
    state = hashlib.sha256()
    for (name, _), one in zip(tensors, whole.tolist(), strict=True):
        state.update(f"{name}={one};".encode())
    return state.hexdigest()[:16]


def _mixed(tensor: Tensor) -> Tensor:
    """The sum, modulo 2^64, over the elements of a number that is made of an element's bits and its place."""
    part, begin = tensor.detach(), 0
    if isinstance(part, DTensor):
        (placement,) = part.placements
        assert placement.is_shard(0), placement
        _, (row, *_) = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        begin, part = row * part.shape[1:].numel(), part.to_local()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = part.contiguous().flatten().view(kinds[part.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for at in range(0, len(bits), SOME):
        some = bits[at : at + SOME].to(torch.int64)
        some += torch.arange(begin + at, begin + at + len(some), device=bits.device) * MIXERS[0]
        for mixer in MIXERS[1:]:
            some ^= some >> 31
            some *= mixer
        some ^= some >> 29
        total += some.sum()
    return total


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            yield f"{name}.{key}", value


def _loss_of(model: nn.Module, shape: Stack, device: torch.device) -> Callable[[], Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, dtype=torch.bfloat16)
    cos, sin = rotations(shape, device, torch.bfloat16)

    def loss() -> Tensor:
        found: Tensor = model(x, cos, sin).float().square().mean()
        return found

    return loss


def _step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[], float]:
    """A step of training, which returns its seconds."""

    def step() -> float:
        start = time.perf_counter()
        loss().backward()  # type: ignore[no-untyped-call]
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
    parser.add_argument("doing", nargs="+", choices=("save", "save-async", "load"))
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--model", choices=list(MODELS), help="Hugging Face's Llama of about this number of weights")
    parser.add_argument("--layers", type=int, help="of that model")
    parser.add_argument("--checkpointing", choices=recomputing.WAYS, default=recomputing.NONE)
    parser.add_argument("--out", type=Path, default=stored.FOLDER, help="where the results go; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # to try the benchmark itself
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape: Stack | Decoder = MODELS[options.model] if options.model else SAVED
    stem = "-".join([STEM, *([options.model] if options.model else [])])
    if options.layers:
        assert isinstance(shape, Decoder), "--layers is of a --model"
        shape, stem = replace(shape, layers=options.layers), f"{stem}-layers-{options.layers}"
    if options.tiny:
        shape, stem = tiny(shape), f"{stem}-tiny"
    with group():
        found = measured(options.folder, options.doing, options.recipe, shape, device, options.checkpointing)
        if dist.get_rank() == 0:
            without = ["FOLDER" if argument == str(options.folder) else argument for argument in arguments]
            record = environment.record(without, found["ranks"], "benchmarks.saving")
            stored.show(keep(options.out, stem, record, found, shape))
    return 0


def keep(out: Path, stem: str, record: dict[str, Any], found: Row, shape: Stack | Decoder) -> dict[str, Any]:
    """Store a run behind those that are there already, on whatever number of ranks they were."""
    before = stored.earlier(out, stem, record, but={"devices"})
    if before is not None:
        record = {**record, "devices": before["environment"]["devices"]}
    rows = [*(before["results"] if before is not None else ()), found]
    return stored.save(out, stem, record, {**asdict(shape), "results": rows})


if __name__ == "__main__":
    sys.exit(main())
