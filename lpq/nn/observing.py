"""Observers of layers: a block in which each pass of these layers has an observer, and how the pass tells it. A layer
lists its observers. Outside of such a block the list is an empty tuple, and a pass makes no further call. A pass keeps
the observers that it began with, so that its backward tells the same observers of ``dy``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from lpq.distributed.part_gathers import gather_rows
from lpq.distributed.shard import plain
from lpq.nn.stateful_layer import StatefulLayer
from lpq.operations.cut import Cut
from lpq.operations.encoder import Wanted, through_operators
from lpq.operations.inputs import as_matrix
from lpq.operations.measuring import measure
from lpq.operations.part_encoders import SpanningStats, along, bind_exchange, bind_part
from lpq.operations.states import State
from lpq.recipes import recipe_sources
from lpq.tensor.observed import Name, Observed, Observer
from lpq.torch_private import autograd

if TYPE_CHECKING:
    from lpq.formats import Quantizer, Storage
    from lpq.nn.parallel_step import SharedOut

O = TypeVar("O", bound=Observer)
_CHANGING = threading.Lock()
"""Held while the observers of layers change: other threads may begin or end a block."""


@contextmanager
def observing(layers: nn.Module | Iterable[nn.Module], observer: O) -> Iterator[O]:
    """Have ``observer`` told of each tensor that ``layers`` encode in the passes inside.

    Blocks may be nested, and threads may have blocks of their own: each observer is told of the passes of all. Behind
    the block, left by an error or not, the layers have the observers that they had before. A backward tells the
    observers of its forward, also behind the block.

    Args:
        layers: A converted model, or some of its layers.
        observer: The object that is told, by its method ``observe``.
    """
    chosen = _layers(layers)
    with _CHANGING:
        for layer in chosen:
            layer.passes.observers = (*layer.passes.observers, observer)
    try:
        yield observer
    finally:
        with _CHANGING:
            for layer in chosen:
                _forget(layer, observer)


def _layers(layers: nn.Module | Iterable[nn.Module]) -> list[StatefulLayer]:
    if not isinstance(layers, nn.Module | Iterable):
        raise TypeError(f"layers must be a converted model or layers of it, got {type(layers).__name__}")
    modules = list(layers.modules()) if isinstance(layers, nn.Module) else list(layers)
    found = [module for module in modules if isinstance(module, StatefulLayer)]
    if isinstance(layers, nn.Module):
        if not found:
            raise ValueError(f"{type(layers).__name__} has no layer of lpq to observe: convert it first, lpq.convert")
    elif others := [type(module).__name__ for module in modules if not isinstance(module, StatefulLayer)]:
        raise ValueError(f"{others[0]} is no layer of lpq: pass the converted model, or layers of it")
    return list({id(layer): layer for layer in found}.values())


def _forget(layer: StatefulLayer, observer: Observer) -> None:
    """Take the observer off the layer once: another block may have put it there, too."""
    left = list(layer.passes.observers)
    last = max(i for i, other in enumerate(left) if other is observer)
    del left[last]
    layer.passes.observers = tuple(left)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ObservedPart(Observed):
    """One tensor of a pass over the ranks of a mesh: this rank's part, or the whole, which all ranks have."""

    cut: Cut | None
    """How it is divided over the ranks."""
    among: str
    """The name of the process group of the ranks."""

    @property
    def is_part(self) -> bool:
        return self.cut is not None

    @property
    def place(self) -> tuple[int, int]:
        if self.cut is None:
            return 0, 0
        return (self.cut.place(0), 0) if self.cut.dim == 0 else (0, self.cut.place(0))

    @property
    def together(self) -> int:
        return self.cut.size if self.cut is not None and self.cut.dim == 0 else math.prod(self.given.shape[:-1])

    def under(self, quantizer: Quantizer) -> Self:
        row, col = operands_of_part(self.cut, quantizer)
        return replace(self, quantizer=quantizer, state=None, seed=None, row=row, col=col)

    def _measured(self, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
        measured = SpanningStats(partial(measure, row=row, col=col), along(self.cut, row, col), row, col)
        (known,), _ = bind_exchange([measured], self.among)([self.value], [()], None)
        return list(known.stats)

    def _encoded(self) -> tuple[Storage | None, Storage | None]:
        x = as_matrix(self.given)
        rows, cols = x.shape
        remembers = self.state is not None
        wanted = Wanted(self.quantizer, (rows, cols), x.dtype, x.device, self.row, self.col, remembers)
        encoder = bind_part(through_operators, wanted, self.cut, self.among).alone(self.among).encoder
        row, col, _ = encoder.encode(x, self.state or (), self.seed)
        of_row = encoder.row.over(row) if encoder.row is not None else None
        return of_row, encoder.col.over(col) if encoder.col is not None else None


def operands_of_part(cut: Cut | None, quantizer: Quantizer) -> tuple[bool, bool]:
    """Whether a part has a row operand and a column operand: those that can be cut so."""
    row, col = (cut is None or cut.why_not(quantizer, one, not one) is None for one in (True, False))
    return row, col


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
        self, name: Name, given: Tensor, quantizer: Quantizer, state: State | None, seed: Tensor | None,
        ends: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Tell all observers of a tensor; ``ends``: where the groups of its rows end, if it has some."""
        offs, parts = ends[0] if ends else None, self.parts
        kind: type[Observed] = Observed
        how: dict[str, Any] = {"quantizer": quantizer, "state": state, "seed": seed, "offs": offs}
        if parts is not None:
            cut = parts.cut_of(name)
            if name == "dy" and parts.high and parts.sequence is not None:
                given = gather_rows(given, parts.sequence, parts.group)
            row, col = operands_of_part(cut, quantizer)
            kind, how = ObservedPart, {**how, "cut": cut, "among": parts.group, "row": row, "col": col}
        self._tell(kind, name, given, **how)

    def _tell(self, kind: Callable[..., Observed], name: Name, given: Tensor, **others: Any) -> None:
        if is_recorded(given):
            raise RuntimeError(
                f"{self.title}: a CUDA graph is recorded while an observer is told of its passes, and would run the "
                "observer never again: record it outside of observing(…), and observe passes that no graph replays"
            )
        again = name != "dy" and autograd.graph_task() != -1
        seen = kind(
            layer=self.layer, name=name, given=plain(given.detach()), stack=self.stack, first=self.first, again=again,
            of_pass=self, **others,
        )  # fmt: skip
        for observer in self.observers:
            observer.observe(seen)


def is_recorded(x: Tensor) -> bool:
    """Whether a CUDA graph is recorded."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def watch(layer: Any, stack: str = "", first: int = 0) -> Watch:
    """Return the observers of a pass that begins; refuse one that a compiler or an exporter traces."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiler or an exporter traces a layer that is observed, and would leave the observer out: run what is "
            'compiled eagerly meanwhile, with torch.compiler.set_stance("force_eager"), and export outside of '
            "observing(…)"
        )
    title = f"{layer.title}.{stack}" if stack else layer.title
    return Watch(layer, layer.passes.observers, title, stack, first)
