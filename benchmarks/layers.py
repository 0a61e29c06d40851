"""The layers of all contenders, also as CUDA graphs, and the bytes that they keep for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import lpq
from benchmarks.contenders import compile_afresh
from lpq.bench.contenders import Contender, in_words
from lpq.bench.layers import Layers, LayerSize, step


def layers_of(everyone: Iterable[Contender], shape: LayerSize, device: torch.device) -> Layers:
    """The layers of all contenders at one shape, of which each is compiled by itself."""
    compile_afresh()
    return Layers(everyone, shape, device)


def graphed(layers: Layers) -> dict[str, Callable[[], None]]:
    """The step of each that is not compiled, recorded once and replayed as CUDA graphs; its layer stays so."""
    steps: dict[str, Callable[[], None]] = {}
    for name, module in layers.modules.items():
        if not isinstance(module, torch._dynamo.OptimizedModule):
            try:
                torch.cuda.make_graphed_callables(module, (torch.randn_like(layers.x, requires_grad=True),))
                steps[name] = step(module, layers.x, layers.dy)
                steps[name]()
            except Exception as error:  # what one library cannot do is a result here too
                steps.pop(name, None)
                layers.failures[name] = f"as a CUDA graph: {in_words(error)}"
    return steps


def held(layers: Layers, name: str) -> int | None:
    """The bytes that a forward keeps for backward besides the parameters; on a GPU only."""
    if name not in layers.modules or layers.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = layers.x.clone()  # nobody but the layer holds it
    y = layers.modules[name](x)
    del x
    return torch.cuda.memory_allocated() - before - int(y.nbytes)


def encoded_bytes(recipe: str, shape: LayerSize) -> int:
    """The bytes of the two operands that backward multiplies and forward made: of x and of w."""
    made = lpq.recipe(recipe)
    total = 0
    for quantizer, size in ((made.x, (shape.inputs, shape.tokens)), (made.w, (shape.inputs, shape.outputs))):
        side = quantizer.side("col")
        total += side.storage.empty(side, size, torch.bfloat16, torch.device("meta")).nbytes
    return total
