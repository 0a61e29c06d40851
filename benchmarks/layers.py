"""One linear layer and its step, as every contender runs it: forward and backward, the weight quantized each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import lpq
from benchmarks.contenders import Contender, compile_afresh, in_words
from benchmarks.shapes import Shape


class Layers:
    """The layers of all contenders at one shape, over the same x and dy; and why some have none."""

    def __init__(self, everyone: Iterable[Contender], shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.x, self.dy = inputs(shape, device)
        self.modules: dict[str, nn.Module] = {}
        self.failures: dict[str, str] = {}
        compile_afresh()
        for contender in everyone:
            try:
                module = made(contender, shape, device)
                step(module, self.x, self.dy)()
                self.modules[contender.name] = module
            except Exception as error:  # what one library cannot do is a result, and the others go on
                self.failures[contender.name] = in_words(error)

    def steps(self) -> dict[str, Callable[[], None]]:
        """The step of each by its name."""
        return {name: step(module, self.x, self.dy) for name, module in self.modules.items()}

    def graphed(self) -> dict[str, Callable[[], None]]:
        """The step of each that is not compiled, recorded once and replayed as CUDA graphs; its layer stays so."""
        steps: dict[str, Callable[[], None]] = {}
        for name, module in self.modules.items():
            if not isinstance(module, torch._dynamo.OptimizedModule):
                try:
                    torch.cuda.make_graphed_callables(module, (torch.randn_like(self.x, requires_grad=True),))
                    steps[name] = step(module, self.x, self.dy)
                    steps[name]()
                except Exception as error:  # what one library cannot do is a result here too
                    steps.pop(name, None)
                    self.failures[name] = f"as a CUDA graph: {in_words(error)}"
        return steps

    def held(self, name: str) -> int | None:
        """The bytes that a forward keeps for backward besides the parameters; on a GPU only."""
        if name not in self.modules or self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        x = self.x.clone()  # nobody but the layer holds it
        y = self.modules[name](x)
        del x
        return torch.cuda.memory_allocated() - before - int(y.nbytes)


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """x, which wants its gradient, and dy."""
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(shape.tokens, shape.outputs, device=device, dtype=torch.bfloat16)


def made(contender: Contender, shape: Shape, device: torch.device) -> nn.Module:
    """The layer of this contender, without bias."""
    plain = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device, dtype=torch.bfloat16)
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


def encoded_bytes(recipe: str, shape: Shape) -> int:
    """The bytes of the two operands that backward multiplies and forward made: those of x and of w."""
    made = lpq.recipe(recipe)
    total = 0
    for quantizer, size in ((made.x, (shape.inputs, shape.tokens)), (made.w, (shape.inputs, shape.outputs))):
        side = quantizer.side("col")
        total += side.storage.empty(side, size, torch.bfloat16, torch.device("meta")).nbytes
    return total
