"""One linear layer and its step, as every contender runs it: forward and backward, the weight quantized each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpq.bench.contenders import Contender, in_words
from lpq.nn import Layer


@dataclass(frozen=True, order=True)
class LayerSize:
    """One linear layer: ``y[tokens, outputs] = x[tokens, inputs] · w[outputs, inputs]ᵀ``."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.inputs}x{self.outputs}"

    @property
    def tensors(self) -> tuple[int, int, int]:
        """The elements of x, w and dy: what a step quantizes."""
        return self.tokens * self.inputs, self.outputs * self.inputs, self.tokens * self.outputs


@dataclass(frozen=True, order=True)
class StackSize(LayerSize):
    """A stack of experts, whose rows together are the tokens."""

    experts: int

    @property
    def tensors(self) -> tuple[int, int, int]:
        x, w, dy = super().tensors
        return x, self.experts * w, dy


class Layers:
    """The layers of all contenders at one size, over the same x and dy; and why some have none."""

    def __init__(self, everyone: Iterable[Contender], size: LayerSize, device: torch.device) -> None:
        self.size, self.device = size, device
        self.x, self.dy = inputs(size, device)
        self.modules: dict[str, nn.Module] = {}
        self.failures: dict[str, str] = {}
        for contender in everyone:
            try:
                module = made(contender, size, device)
                step(module, self.x, self.dy)()
                self.modules[contender.name] = module
            except Exception as error:  # what one contender cannot do is a result, and the others go on
                self.failures[contender.name] = in_words(error)

    def steps(self) -> dict[str, Callable[[], None]]:
        """The step of each by its name."""
        return {name: step(module, self.x, self.dy) for name, module in self.modules.items()}


def inputs(size: LayerSize, device: torch.device) -> tuple[Tensor, Tensor]:
    """x, which wants its gradient, and dy."""
    x = torch.randn(size.tokens, size.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(size.tokens, size.outputs, device=device, dtype=torch.bfloat16)


def made(contender: Contender, size: LayerSize, device: torch.device) -> nn.Module:
    """The layer of this contender, without bias."""
    plain = nn.Linear(size.inputs, size.outputs, bias=False, device=device, dtype=torch.bfloat16)
    module = contender.convert(nn.Sequential(plain))
    if isinstance(module, nn.Sequential):  # nobody pays for the container
        module = module[0]
    if not contender.compiled:
        return module
    return torch.compile(module, fullgraph=True, dynamic=False, mode=contender.mode)  # type: ignore[return-value]


def step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are dropped, as an optimizer would."""
    parameters = list(module.parameters())

    def run() -> None:
        module(x).backward(dy)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return run


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of each layer that was converted, by name; not of experts."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Layer) and module.weight.dim() == 2:
            rows, cols = module.weight.shape
            found[name] = (rows, cols) if module.transposed else (cols, rows)
    return found
