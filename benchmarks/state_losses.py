"""Losses with optimizer states in formats, beside fp32 states of the same seeds: ``python -m benchmarks.state_losses``.

The model and the text are the toy's of ``lpq compare``, without a recipe. Each training leaves a file in
``results/curves/states``, and one whose file is there is not repeated. ``--size 60m --device cuda`` trains on a GPU.
Other libraries take part where they are installed: ``pip install torchao bitsandbytes``. For a machine without network
``pip download --no-deps`` brings the wheels torchao-0.18.0-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64 and
bitsandbytes-0.50.2-py3-none-manylinux_2_24_x86_64, 43 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from benchmarks.evidence import CURVES, LIBRARIES
from benchmarks.states import FORMATS, others, stored
from benchmarks.trained import nothing, settings, trained
from lpq.tensor import QuantizedTensor
from lpq.train import trainings
from lpq.train.machine import pick_device
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

SEEDS = 6
"""Fixed before anything was trained."""
EXACT = "fp32 states"


def contenders() -> dict[str, Callable[..., Optimizer]]:
    """Make each optimizer from groups of parameters."""
    found: dict[str, Callable[..., Optimizer]] = {EXACT: partial(AdamW, fused=True)}
    found |= {f"lpq {name}": partial(stored, formats) for name, formats in FORMATS.items()}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            found[f"{name} AdamW8bit"] = partial(others, name=name)
    return found


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of a state, those inside of subclasses in place of these."""
    if isinstance(value, QuantizedTensor):
        yield from value.buffers
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def state_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of all states; memory that several share counts once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        for one in tensors(value)
    }
    return sum(storages.values())


def tensor_rates(optimizer: Optimizer, *_: Any) -> None:
    """Give learning rates as tensors, as torchao wants them."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])


def train(
    title: str, make: Callable[..., Optimizer], size: str, device: torch.device, seed: int, tokens: str | None = None
) -> Training:
    """Train the model of a size once."""
    config = settings(size, tokens, device, seed)

    def exchange(trainer: Trainer) -> None:
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in trainer.optimizer.param_groups]
        trainer.optimizer = make(groups, lr=config.lr, betas=(0.9, 0.95))
        if "torchao" in title:
            trainer.optimizer.register_step_pre_hook(tensor_rates)

    command = "python -m benchmarks.state_losses" + (f" --size {size}" if size != "toy" else "")
    trainer, found = trained(title, config, None, command, exchange, nothing)
    weights = sum(p.numel() for p in trainer.model.parameters())
    return replace(
        found,
        policy="" if title == EXACT else title,
        settings={**found.settings, "bytes_a_weight": round(state_bytes(trainer.optimizer) / weights, 3)},
        machine={**found.machine, **{name: version(name) for name in LIBRARIES if name in title}},
    )


def main() -> None:
    """Do the trainings that are not there, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="toy", help="A size of `lpq compare`.")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    folder = CURVES / ("states" if given.size == "toy" else f"states-{given.size}")
    folder.mkdir(exist_ok=True)
    for seed in range(SEEDS):
        for title, make in contenders().items():
            if not trainings.file_of(folder, title, seed).exists():
                found = train(title, make, given.size, pick_device(given.device), seed)
                found.write(folder)
                print(f"{title}, seed {seed}: {found.result:.4f}, {found.settings['bytes_a_weight']} bytes", flush=True)


if __name__ == "__main__":
    main()
