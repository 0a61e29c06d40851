"""States that several layers share, and inputs that were encoded by such a state before they got to these layers.

A norm or another producer encodes its output once, for all layers that multiply it. A recipe that remembers inputs
has a history in each of these layers, and the histories are equal as long as the layers get the same inputs. So the
layers share the buffers of the first, each under its own name, and the producer encodes by them. The state moves in
backward, and once: in the first of these layers whose backward would move a state of its own. So it moves where the
producer has no backward, too, as behind a frozen embedding.

Sharing ends where buffers may be filled, exchanged or moved one by one: when a state dict or a checkpoint is loaded,
with another device or recipe, and where a layer encodes its input itself. Then it has buffers of its own, and the next
call of ``shared_state`` compares them. State dicts have a tensor for each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.nn.encoded_inputs import Given
from lpq.nn.plan import LayerBuffer, Plan
from lpq.nn.stateful_layer import StatefulLayer
from lpq.operations import remember
from lpq.operations.cut import Cut
from lpq.operations.states import State
from lpq.registry.showing import listed
from lpq.tensor import QuantizedTensor
from lpq.tensor.with_value import WithValue
from lpq.torch_private.tensors import local_part, version_of


def shared_state(layers: Sequence[StatefulLayer]) -> State | None:
    """The state of inputs that these layers have in common, and share from now on; None if their recipes remember
    nothing of them. Layers whose states differ are refused.

    A producer calls it in each pass. The values are compared, and a GPU waited for, where the layers do not share them
    yet."""
    first = layers[0]
    if first.passes.borrowed:  # of a layer that encodes its input itself by now
        first.own_buffers()
    state = {m.key: getattr(first, m.name) for m in first.state_buffers() if m.tensor == "x"}
    for layer in layers[1:]:
        if not _has(layer, state):
            _lend(first, layer)
    return state or None


class EncodedBy:
    """The state by which an input was encoded for layers that share it, and what was measured of the input. A producer
    puts it on the tensor, as ``encoded_by``."""

    def __init__(
        self,
        layers: Sequence[StatefulLayer],
        state: State,
        measured: Sequence[Tensor],
        col: bool,
        over: tuple[str, Cut | None] | None = None,
    ) -> None:
        """``measured``: the statistics that the encoder returned, for the row operand and, with ``col``, for both; of
        this rank's part alone, where a state encoded it. ``over``: the group of ranks over whose parts statistics were
        reduced, and how its rows are divided; None: no ranks share it."""
        self.layers, self.state, self.measured, self.col, self.over = layers, state, measured, col, over
        self._receivers: set[int] = set()
        """The layers that have got the input in a pass that may have a backward."""
        self._moved = False

    @classmethod
    def own(cls, layer: StatefulLayer, x: QuantizedTensor) -> EncodedBy | None:
        """Return the state by which ``x`` was encoded, if the layer has that very state."""
        by = x.encoded_by if not x.writes.count else None
        return by if isinstance(by, cls) and by.over is None and _has(layer, by.state) else None

    @classmethod
    def over_ranks(cls, layer: StatefulLayer, given: Tensor) -> EncodedBy | None:
        """Return by what a producer encoded this rank's part of an input, for layers that ranks share out, among them
        this one. Compiled code cannot tell whose state it was."""
        x: Any = local_part(given)
        counted = not (torch.compiler.is_compiling() or given.is_inference() or x.is_inference())
        if isinstance(x, WithValue) and counted and (version_of(given) or version_of(x)):
            raise x.written()
        for one in (x, *x.beside) if isinstance(x, WithValue) else (x,):
            by = one.encoded_by if not x.writes.count else None
            if isinstance(by, cls) and by.over is not None and layer in by.layers:
                return by if not by.state or (_has(layer, by.state) and not torch.compiler.is_compiling()) else None
        return None

    def take(self, layer: StatefulLayer) -> None:
        """Note that this layer has got the input, if the pass may have a backward. The layer itself has none where it
        is frozen and the input needs no gradient: then others move the state."""
        if torch.is_grad_enabled():
            self._receivers.add(id(layer))

    def move(self, quantizer: Quantizer, measured: Sequence[Tensor], col: bool) -> bool:
        """Have the state remember the input, unless another layer's backward has. Return whether the layer is to do so,
        together with what else it remembers; ``col``: of statistics for both operands.

        ``measured`` are the statistics as backward has them: activation checkpointing may have measured again."""
        if self._moved:
            return False
        if absent := [layer for layer in self.layers if id(layer) not in self._receivers]:
            have = listed([layer.title for layer in self.layers if id(layer) in self._receivers])
            raise RuntimeError(
                f"{absent[0].title} shares its states of inputs with {have}, and did not get, in a pass that "
                "trains it, the input that was encoded for all of them: its states would be of an input that it "
                "never had. Layers that skip passes must not be fused with others"
            )
        self._moved = True
        if col != self.col:  # this layer is frozen, and others are not
            remember(quantizer, local_state(self.state), [*measured], col=self.col)
        return col == self.col


def buffers_at_hand(
    plan: Plan, given: QuantizedTensor, x: QuantizedTensor, needs_dw: bool, by_own: bool
) -> Given | None:
    """The buffers that a producer left for layers with this quantizer, without a check that is not a comparison; None
    if there are none. ``x`` is the encoding of the input ``given``, or one beside it. ``by_own``: as for
    ``input_buffers``."""
    if isinstance(given, WithValue) and not given.is_inference() and version_of(given):
        raise given.written()
    record = x.operand_cache if by_own or "x" not in plan.remembered else None
    if record is None or record[0] is not plan.x or (needs_dw and not record[2]):
        return None
    if needs_dw and record[3] is not None:
        record[3].check(*record[2])
    return record[1], record[2] if needs_dw else (), record[3]


def local_state(state: State) -> State:
    """The state as this rank has it: all ranks have the same."""
    return {key: local_part(memory) for key, memory in state.items()}


def _has(layer: StatefulLayer, state: State) -> bool:
    """Whether these very buffers are the layer's."""
    return all(map(is_, map(layer._buffers.get, map("x_".__add__, state)), state.values()))


def why_states_differ(layers: Sequence[StatefulLayer]) -> str | None:
    """Why layers with the same recipe for inputs, among these, cannot share the states that they have of these; None if
    they can. A GPU is waited for."""
    for i, layer in enumerate(layers):
        first = next((other for other in layers[:i] if _alike(other, layer)), layer)
        if first is not layer and (name := _differing(first, layer)) is not None:
            return f"{name} of {first.title} and {layer.title} differ, as if they had not got the same inputs"
    return None


def _states(layer: StatefulLayer) -> list[LayerBuffer]:
    return [memory for memory in layer.state_buffers() if memory.tensor == "x"]


def _planned(layer: StatefulLayer) -> Quantizer | None:
    return layer.passes.plan.x if layer.passes.plan is not None else None


def _alike(first: StatefulLayer, layer: StatefulLayer) -> bool:
    """Whether both have the same kind of states of inputs."""
    return _planned(first) == _planned(layer) and _states(first) == _states(layer)


def _differing(first: StatefulLayer, layer: StatefulLayer) -> str | None:
    """A state of inputs whose values differ. Values that are still to come are equal."""
    for memory in reversed(_states(layer)):
        a, b = (local_part(getattr(each, memory.name)) for each in (first, layer))
        to_come = a.is_meta and b.is_meta
        if not to_come and (a.device != b.device or not torch.equal(a.view(torch.int32), b.view(torch.int32))):
            return memory.name
    return None


def _lend(first: StatefulLayer, layer: StatefulLayer) -> None:
    """Have a layer share the first one's state of inputs, if it is equal."""
    why = ""
    if not _alike(first, layer):
        why = f"one has x={_planned(first)}, and the other x={_planned(layer)}"
    elif (name := _differing(first, layer)) is not None:
        why = (
            f"{name} differs, as if they had not got the same inputs, or as if functional_call had exchanged it in one "
            f"of them alone: fill it with equal values, by {name}.copy_, or do not fuse them"
        )
    if why:
        raise ValueError(f"{first.title} and {layer.title} cannot share their states of x: {why}")
    names = [memory.name for memory in _states(layer)]
    for name in names:
        setattr(layer, name, getattr(first, name))
    layer.passes.borrowed = (*layer.passes.borrowed, *names)
