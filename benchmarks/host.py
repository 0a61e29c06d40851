"""Host time of the step of one linear layer that is so small that the GPU waits.

PyTorch runs backward of CUDA tensors in a thread of its own. Two threads that take turns on two cores cost every
library that runs Python in both; so the same is measured with backward in the calling thread. And it is measured where
forward and backward were recorded in CUDA graphs, of which the host has next to nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.layers import graphed, layers_of
from benchmarks.shapes import HOST
from lpq.bench.contenders import Contender
from lpq.bench.timing import Effort, on_host


def measure(everyone: list[Contender], effort: Effort, device: torch.device) -> dict[str, Any]:
    """Microseconds of a step of each contender, of the same in one thread, and as CUDA graphs."""
    layers = layers_of(everyone, HOST, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken = on_host(layers.steps(), effort, synchronize)
    with torch.autograd.set_multithreading_enabled(False):
        alone = on_host(layers.steps(), effort, synchronize)
    replayed = on_host(graphed(layers) if device.type == "cuda" else {}, effort, synchronize)
    return {
        "shape": str(HOST),
        "results": [
            {
                **c.record(),
                **(taken[c.name].record("us") if c.name in taken else {}),
                **({"one_thread_us": alone[c.name].median * 1e6} if c.name in alone else {}),
                **({"graphed_us": replayed[c.name].median * 1e6} if c.name in replayed else {}),
                "failure": layers.failures.get(c.name),
            }
            for c in everyone
        ],
    }
