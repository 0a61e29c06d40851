"""What a user asks about a training run beyond its loss: the bytes it holds, and which kernels it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lpq.core import Quantizer
from lpq.nn import Linear
from lpq.ops import choose


@dataclass
class Held:
    """The memory that autograd keeps from the forward for the backward."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(s.nbytes() for s in self.storages.values())


@contextmanager
def held_for_backward(model: nn.Module) -> Iterator[Held]:
    """Count what the forward inside keeps for backward: each memory once, the model's own not at all."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held = Held()

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held.storages[storage.data_ptr()] = storage  # holding it keeps the address from being given out again
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield held


@dataclass(frozen=True)
class Served:
    """One GEMM of a model's layers, and what runs it."""

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


def served_by(model: nn.Module, device: torch.device) -> list[Served]:
    """What runs the GEMMs of the model's linear layers, as its last step had them; layers alike are counted."""
    counted: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            counted.update((gemm, *how) for gemm, how in _gemms(module, device).items())
    return [Served(*what, layers) for what, layers in sorted(counted.items(), key=lambda item: GEMMS.index(item[0][0]))]


GEMMS = ("fprop", "dgrad", "wgrad")


def _gemms(layer: nn.Linear, device: torch.device) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    recipe = layer.recipe if isinstance(layer, Linear) else None
    if recipe is None:
        return dict.fromkeys(GEMMS, ("left to PyTorch", "torch", ()))
    x, w, dy = recipe.x, recipe.w, recipe.dy
    pairs = ((x.side("row"), w.side("row")), (dy.side("row"), w.side("col")), (dy.side("col"), x.side("col")))
    return {gemm: _served(*pair, device) for gemm, pair in zip(GEMMS, pairs, strict=True)}


def _served(a: Quantizer, b: Quantizer, device: torch.device) -> tuple[str, str, tuple[str, ...]]:
    operands = f"{a} · {b}"
    if a.plain and b.plain:
        return operands, "torch", ()  # ordinary matrices: there is nothing to choose
    choice = choose("gemm", (a.text, b.text), device)
    return operands, choice.backend, tuple(f"{k.backend} {why}" for k, why in choice.rejected)
