"""Modules inside of the wrappers of torch: ``torch.compile(module)``, and the wrapper that checkpoints activations."""

from __future__ import annotations

from torch import nn

from lpq.torch_private.wrappers import WRAPPED


def inside_of(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper of torch holds; None: the module is no wrapper."""
    return next((module._modules[name] for name in WRAPPED if name in module._modules), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers of torch."""
    while (inside := inside_of(module)) is not None:
        module = inside
    return module


def children_inside(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module, without wrappers of torch around them."""
    return {name: None if child is None else unwrapped(child) for name, child in module._modules.items()}
