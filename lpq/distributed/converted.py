"""Converted layers, as far as ranks that share a model look for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn


class SharedLayer(Protocol):
    """A layer, as far as ranks change it together."""

    @property
    def title(self) -> str:
        """The name of the layer in messages."""

    def shared_weight(self) -> Tensor:
        """The weight, as ranks share it."""


def is_converted(module: nn.Module) -> bool:
    """Whether it is a layer of ``lpq.nn``, which has a ``model``, ``passes``, a ``schedule`` and a recipe."""
    return hasattr(type(module), "state_buffers")


def converted(root: nn.Module) -> Iterator[Any]:
    """Yield the layers of ``lpq.nn`` in a module."""
    return filter(is_converted, root.modules())
