"""Observers of layers: a block in which each pass of these layers has an observer, and how the pass tells it. A layer
lists its observers. Outside of such a block the list is an empty tuple, and a pass makes no further call. A pass keeps
the observers that it began with, so that its backward tells the same observers of ``dy``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    with run_eagerly(), _block(stateful, observer):
        yield observer


def unobserved(layers: Iterable[StatefulLayer]) -> AbstractContextManager[None]:
    """Have none of the present observers told of the passes inside."""
    return _block([*layers], None)


class _Observers(tuple[Observer, ...]):
    """The observers of a layer that a pass tells, and all blocks that its threads have begun and not ended."""

    blocks: Mapping[object, Observer | None]
    """The observer of each block, in their order; None: those before it are told of nothing."""


@contextmanager
def _block(layers: Sequence[StatefulLayer], observer: Observer | None) -> Iterator[None]:
    """Have the layers list a block of ``observing`` inside, or, without an observer, a block of ``unobserved``."""
    block = object()
    with _CHANGING:
        for layer in layers:
            _list(layer, {**_blocks(layer), block: observer})
    try:
        yield
    finally:
        with _CHANGING:
            for layer in layers:
                _list(layer, {other: one for other, one in _blocks(layer).items() if other is not block})


def _blocks(layer: StatefulLayer) -> Mapping[object, Observer | None]:
    return getattr(layer.passes.observers, "blocks", {})


def _list(layer: StatefulLayer, blocks: Mapping[object, Observer | None]) -> None:
    told: list[Observer] = []
    for observer in blocks.values():
        told = [] if observer is None else [*told, observer]
    observers = _Observers(told)
    observers.blocks = blocks
    layer.passes.observers = observers if blocks else ()  # compiled code guards the kind, too


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
