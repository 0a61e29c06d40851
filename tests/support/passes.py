"""One forward and backward of a module, and the ways in which a forward can be run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.modes import Watched
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

Run = Callable[[Any, Tensor], Tensor]


def plainly(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def within(mode: Callable[[], Any], module: Any, x: Tensor) -> Tensor:
    """Run forward in a mode."""
    with mode():
        return plainly(module, x)


watched = partial(within, Watched)
"""By way of operators."""
offloaded = partial(within, save_on_cpu)
evaluated = partial(within, torch.no_grad)
inferred = partial(within, torch.inference_mode)


def autocast(module: Any, x: Tensor) -> Tensor:
    return within(partial(torch.autocast, x.device.type, torch.bfloat16), module, x)


def recomputed(module: Any, x: Tensor, use_reentrant: bool = False) -> Tensor:
    """Run forward by activation checkpointing, and again in backward."""
    y: Tensor = checkpoint(partial(plainly, module), x, use_reentrant=use_reentrant)
    return y


reentrant = partial(recomputed, use_reentrant=True)


def compiled(module: Any, x: Tensor) -> Tensor:
    """Run forward as one graph, compiled anew."""
    torch._dynamo.reset()
    return plainly(torch.compile(module, fullgraph=True, backend="aot_eager"), x)


@torch.no_grad()
def in_a_graph(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Record forward in a CUDA graph. Return what its replay makes of another input, and what forward makes of that."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    module(x)
    with torch.cuda.stream(stream):
        module(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y: Tensor = module(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return y, plainly(module, x)


def nodes_of(y: Tensor) -> set[str]:
    """The names of the functions that autograd has behind a tensor."""
    nodes, seen = [y.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [n for n, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def step(
    module: Any, x: Tensor, run: Run = plainly, dy: Tensor | None = None, *, needs_dx: bool = True
) -> list[Tensor | None]:
    """Return what a step gives: y, dx, the gradients of the parameters, and the buffers after it.

    Random bits are the same in each step. The gradient of y is the sine of y, unless ``dy`` is given.
    """
    x = x.detach().requires_grad_(needs_dx)
    module.zero_grad()
    torch.manual_seed(3)
    y = run(module, x)
    if y.requires_grad:
        y.backward(torch.sin(y.detach()) if dy is None else dy)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *(buffers[n].clone() for n in sorted(buffers))]
