"""Observers of layers: a block in which each pass of these layers has an observer, and how the pass tells it. A layer
lists its observers. Outside of such a block the list is an empty tuple, and a pass makes no further call. A pass keeps
the observers that it began with, so that its backward tells the same observers of ``dy``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lpq.distributed.part_gathers import gather_rows
from lpq.distributed.shard import plain
from lpq.formats import Quantizer
from lpq.kernels.host_to_device import captured
from lpq.nn.eagerly import run_eagerly
from lpq.nn.parallel_step import SharedOut
from lpq.nn.stateful_layer import StatefulLayer
from lpq.operations.states import State
from lpq.recipes import recipe_sources
from lpq.tensor.observed import Name, Observed, Observer, operands_of_part
from lpq.torch_private import autograd

O = TypeVar("O", bound=Observer)
_CHANGING = threading.Lock()
"""Held while the observers of layers change: other threads may begin or end a block."""


@contextmanager
def observing(layers: nn.Module | Iterable[nn.Module], observer: O) -> Iterator[O]:
    """Have ``observer`` told of each tensor that ``layers`` encode in the passes inside.

    Blocks may be nested, and threads may have blocks of their own: each observer is told of the passes of all. Behind
    the block, left by an error or not, the layers have the observers that they had before. A backward tells the
    observers of its forward, also behind the block. Compiled functions run eagerly inside.

    Args:
        layers: A converted model, or some of its layers.
        observer: The object that is told, by its method ``observe``.
    """
    stateful = _layers(layers)
    with run_eagerly():
        with _CHANGING:
            for layer in stateful:
                layer.passes.observers = (*layer.passes.observers, observer)
        try:
            yield observer
        finally:
            with _CHANGING:
                for layer in stateful:
                    _forget(layer, observer)


@contextmanager
def unobserved(layers: Iterable[StatefulLayer]) -> Iterator[None]:
    """Have none of the present observers told of the passes inside."""
    with _CHANGING:
        former = [(layer, layer.passes.observers) for layer in layers]
        for layer, _ in former:
            layer.passes.observers = ()
    try:
        yield
    finally:
        with _CHANGING:
            for layer, observers in former:
                layer.passes.observers = (*observers, *layer.passes.observers)


def _layers(layers: nn.Module | Iterable[nn.Module]) -> list[StatefulLayer]:
    if not isinstance(layers, nn.Module | Iterable):
        raise TypeError(f"layers must be a converted model or layers of it, got {type(layers).__name__}")
    modules = list(layers.modules()) if isinstance(layers, nn.Module) else list(layers)
    stateful = [module for module in modules if isinstance(module, StatefulLayer)]
    if isinstance(layers, nn.Module):
        if not stateful:
            raise ValueError(f"{type(layers).__name__} has no layer of lpq to observe: convert it first, lpq.convert")
    elif others := [type(module).__name__ for module in modules if not isinstance(module, StatefulLayer)]:
        raise ValueError(f"{others[0]} is no layer of lpq: pass the converted model, or layers of it")
    return list({id(layer): layer for layer in stateful}.values())


def _forget(layer: StatefulLayer, observer: Observer) -> None:
    """Take the observer off the layer once: another block may have put it there, too."""
    observers = list(layer.passes.observers)
    last = max(i for i, other in enumerate(observers) if other is observer)
    del observers[last]
    layer.passes.observers = tuple(observers)


class Watch(NamedTuple):
    """The observers of one pass of a layer."""

    layer: Any
    observers: tuple[Observer, ...]
    title: str
    stack: str = ""
    first: int = 0
    """The number of this rank's first group."""
    parts: SharedOut | None = None
    """How the tensors are divided over ranks."""

    def result(self, y: Tensor, ends: Sequence[Tensor]) -> None:
        """Tell of the output, unless it is a part."""
        if self.parts is None:
            self.tell("y", y, recipe_sources.high_precision().x, None, None, ends)

    def tell(
        self, name: Name, tensor: Tensor, quantizer: Quantizer, state: State | None, seed: Tensor | None,
        ends: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Tell all observers of a tensor; ``ends``: where the groups of its rows end, if it has some."""
        if captured(tensor.device):
            raise RuntimeError(
                f"{self.title}: a CUDA graph is recorded while an observer is told of its passes, and would run the "
                "observer never again: record it outside of observing(…), and observe passes that no graph replays"
            )
        parts, how = self.parts, dict[str, Any]()
        if parts is not None:
            cut = parts.cut_of(name)
            if name == "dy" and parts.high and parts.sequence is not None:
                tensor = gather_rows(tensor, parts.sequence, parts.group)
            row, col = operands_of_part(cut, quantizer)
            how = {"cut": cut, "among": parts.group, "row": row, "col": col}
        observation = Observed(
            layer=self.layer, name=name, given=plain(tensor.detach()), quantizer=quantizer, state=state, seed=seed,
            stack=self.stack, offs=ends[0] if ends else None, first=self.first, of_pass=self,
            again=name != "dy" and autograd.graph_task() != -1, **how,
        )  # fmt: skip
        for observer in self.observers:
            observer.observe(observation)


def watch(layer: Any, stack: str = "", first: int = 0) -> Watch:
    """Return the observers of a pass that begins; refuse one that a compiler or an exporter traces."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiler or an exporter traces a layer that is observed, and would leave the observer out: export "
            "outside of observing(…), and leave the compiler's stance as that sets it: compiled code then runs eagerly"
        )
    title = f"{layer.title}.{stack}" if stack else layer.title
    return Watch(layer, layer.passes.observers, title, stack, first)
