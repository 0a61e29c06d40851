"""One linear layer and its step, as every contender runs it: forward and backward, the weight quantized each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpq.bench.contenders import Contender, in_words
from lpq.nn import GroupedLinear, Layer


@dataclass(frozen=True, order=True)
class LayerSize:
    """One linear layer: ``y[tokens, outputs] = x[tokens, inputs] · w[outputs, inputs]ᵀ``."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.inputs}x{self.outputs}"

    @property
    def weight(self) -> str:
        """The size of its weight."""
        return f"{self.inputs}x{self.outputs}"

    @property
    def tensors(self) -> tuple[int, int, int]:
        """The elements of x, w and dy: what a step quantizes."""
        return self.tokens * self.inputs, self.outputs * self.inputs, self.tokens * self.outputs

    @property
    def depths(self) -> tuple[int, int, int]:
        """The numbers of elements over which fprop, dgrad and wgrad sum."""
        return self.inputs, self.outputs, self.tokens

    @property
    def lines(self) -> tuple[tuple[int, int], ...]:
        """The elements in a line of codes, and in a line of the result, of fprop, dgrad and wgrad."""
        return (self.inputs, self.outputs), (self.outputs, self.inputs), (self.tokens, self.inputs)


@dataclass(frozen=True, order=True)
class StackSize(LayerSize):
    """A stack of experts, whose rows together are the tokens."""

    experts: int

    def __str__(self) -> str:
        return f"{self.experts} experts, {super().__str__()}"

    @property
    def weight(self) -> str:
        return f"{self.experts}x{super().weight}"

    @property
    def depths(self) -> tuple[int, int, int]:
        """As of a layer; the gradient of a weight sums over the rows of its expert alone, as many as of any other."""
        return self.inputs, self.outputs, max(1, self.tokens // self.experts)

    @property
    def lines(self) -> tuple[tuple[int, int], ...]:
        """As of a layer; the rows of an expert are padded where the gradient of a weight sums over them."""
        *others, _ = super().lines
        return *others, (self.outputs, self.inputs)

    @property
    def tensors(self) -> tuple[int, int, int]:
        x, w, dy = super().tensors
        return x, self.experts * w, dy


class Layers:
    """The layers of all contenders at one size, over the same x and dy; and why some have none."""

    def __init__(self, everyone: Iterable[Contender], size: LayerSize, device: torch.device) -> None:
        self.size, self.device = size, device
        self.x, self.dy = inputs(size, device)
        self.ends = ends(size, device)
        self.modules: dict[str, nn.Module] = {}
        self.failures: dict[str, str] = {}
        for contender in everyone:
            try:
                module = layer_of(contender, size, device)
                step(module, self.x, self.dy, *self.ends)()
                self.modules[contender.name] = module
            except Exception as error:  # what one contender cannot do is a result, and the others go on
                self.failures[contender.name] = in_words(error)

    def steps(self) -> dict[str, Callable[[], None]]:
        """The step of each by its name."""
        return {name: step(module, self.x, self.dy, *self.ends) for name, module in self.modules.items()}


def inputs(size: LayerSize, device: torch.device) -> tuple[Tensor, Tensor]:
    """x, which wants its gradient, and dy."""
    x = torch.randn(size.tokens, size.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(size.tokens, size.outputs, device=device, dtype=torch.bfloat16)


def ends(size: LayerSize, device: torch.device) -> tuple[Tensor, ...]:
    """The end of each expert's rows, where all experts get as many; empty for a layer that has no experts."""
    if not isinstance(size, StackSize):
        return ()
    places = torch.arange(1, size.experts + 1, device=device) * size.tokens // size.experts
    return (places.to(torch.int32),)


def layer_of(contender: Contender, size: LayerSize, device: torch.device) -> nn.Module:
    """The layer of this contender, without bias."""
    how: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    plain: nn.Module = (
        GroupedLinear(size.experts, size.inputs, size.outputs, recipe=None, **how)
        if isinstance(size, StackSize)
        else nn.Linear(size.inputs, size.outputs, **how)
    )
    module = contender.convert(nn.Sequential(plain))
    if isinstance(module, nn.Sequential):  # nobody pays for the container
        module = module[0]
    if not contender.compiled:
        return module
    return torch.compile(module, fullgraph=True, dynamic=False, mode=contender.mode)  # type: ignore[return-value]


def step(module: nn.Module, x: Tensor, dy: Tensor, *groups: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are dropped, as an optimizer would. ``groups``: what ``ends`` returned."""
    parameters = list(module.parameters())

    def run() -> None:
        module(x, *groups).backward(dy)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return run


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of each layer that was converted, by name; not of experts."""
    sizes = {}
    for name, module in model.named_modules():
        if isinstance(module, Layer) and module.weight.dim() == 2:
            rows, cols = module.weight.shape
            sizes[name] = (rows, cols) if module.transposed else (cols, rows)
    return sizes
