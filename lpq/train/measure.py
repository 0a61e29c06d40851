"""Measurements of a training run beyond its loss: the bytes that it holds and sends, and the kernels that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpq.formats import Quantizer
from lpq.kernels import choose
from lpq.nn import Layer
from lpq.observe import Collective, collectives, gathered_bytes, held_bytes
from lpq.recipes.gemms import GEMMS
from lpq.tensor.fsdp_protocol import Gathered
from lpq.torch_private.tensors import local_part
from lpq.train.team import Team


@contextmanager
def held_for_backward(model: nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Note the memory that the forward inside keeps for backward, by address: each once, the model's own not at all."""
    tensors = (*model.parameters(), *model.buffers())
    own = {saved.untyped_storage().data_ptr() for t in tensors for saved in _memory(t)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # holding it keeps the address from being given out again
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield kept


def _memory(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of this tensor."""
    part = local_part(tensor)
    return part.buffers if isinstance(part, Gathered) else [part]


@dataclass(frozen=True)
class StepBytes:
    """The bytes that one step held and sent; of several ranks, on the rank that held most."""

    ranks: int
    held: int
    """The bytes kept from the forward for the backward."""
    forward: int
    backward: int
    """The bytes gathered in each of the two passes: whole weights, once for each gather."""
    weights: int
    gradients: int
    optimizer: int
    """The bytes of the optimizer's state, fp32 masters included."""
    peak: int | None
    """The most memory of the GPU that tensors took; None on a CPU."""


class Probe:
    """Measures one step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
        self.model, self.optimizer, self.team = model, optimizer, team
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._calls: list[list[Collective]] = [[], []]
        if team.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(team.device)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure the forward that runs inside."""
        with held_for_backward(self.model) as self._kept, self._watch(0):
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Measure the backward that runs inside."""
        return self._watch(1)

    @contextmanager
    def _watch(self, phase: int) -> Iterator[None]:
        watching: AbstractContextManager[list[Collective]] = collectives() if self.team.many else nullcontext([])
        with watching as self._calls[phase]:
            yield

    def measured(self) -> StepBytes:
        """Return the measurements; call it between the optimizer's step and ``zero_grad``."""
        device, parameters = self.team.device, list(self.model.parameters())
        states = self.optimizer.state_dict()["state"].values()
        state = [value for values in states for value in values.values() if isinstance(value, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        kept = sum(storage.nbytes() for storage in self._kept.values())
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        held, weights, reduced, optimizer, peak = (
            self.team.largest(size)
            for size in (kept, *(sum(map(held_bytes, t)) for t in (parameters, gradients, state)), peak)
        )
        forward, backward = map(gathered_bytes, self._calls)
        return StepBytes(self.team.size, held, forward, backward, weights, reduced, optimizer, peak or None)


@dataclass(frozen=True)
class ServedProduct:
    """One product of a model's layers, and the kernel that runs it."""

    gemm: str
    """``fprop``, ``dgrad`` or ``wgrad``."""
    operands: str
    """The formats of its two operands."""
    kernel: str
    """``reference``, or the backend of the kernel."""
    why_not: tuple[str, ...]
    """The kernels that would be preferred, and why each does not run here."""
    layers: int
    """How many layers run it so."""


def served_by(model: nn.Module, device: torch.device) -> list[ServedProduct]:
    """List the kernels of the products of the model's linear layers in its last step; equal layers share an entry."""
    counts: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear | Layer):
            counts.update((gemm, *how) for gemm, how in _gemms(module, device).items())
    return [
        ServedProduct(*what, layers)
        for what, layers in sorted(counts.items(), key=lambda item: GEMMS.index(item[0][0]))
    ]


def _gemms(layer: nn.Module, device: torch.device) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    recipe = layer.recipe if isinstance(layer, Layer) else None
    if recipe is None:
        return dict.fromkeys(GEMMS, ("left to PyTorch", "torch", ()))
    return {gemm: _served(*product, device) for gemm, product in recipe.products.items()}


def _served(a: Quantizer, b: Quantizer, device: torch.device) -> tuple[str, str, tuple[str, ...]]:
    operands = f"{a} · {b}"
    if a.plain and b.plain:
        return operands, "torch", ()  # ordinary matrices: there is nothing to choose
    choice = choose("gemm", (a.text, b.text), device)
    backends: dict[str, dict[str, None]] = {}
    for kernel, reason in choice.rejected:  # one reason of several kernels is given once
        backends.setdefault(reason, {})[kernel.backend] = None
    return operands, choice.backend, tuple(f"{', '.join(names)}: {reason}" for reason, names in backends.items())
