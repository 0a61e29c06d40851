"""Functions of tensors that a GPU replays: the host launches a CUDA graph in place of hundreds of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.registry.warning import warn
from lpq.torch_private.dispatch import TorchDispatchMode
from lpq.torch_private.operators import copy_each
from lpq.torch_private.pytree import tree_leaves

Function = Callable[[Any, Sequence[Tensor]], Any]
"""A function of something that can be hashed and of tensors on one device, and of nothing else: it draws no random
bits and writes to none of the tensors."""


class Replays:
    """Calls functions; on a GPU by a graph for each function and each kind of arguments, from the second call on.

    Graphs share their memory, so one runs at a time, whatever the streams of the calls.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, Recording] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        """The stream of the last call."""
        self._pool: Any = None

    def __call__(self, function: Function, what: Hashable, tensors: Sequence[Tensor]) -> Any:
        """Return ``function(what, tensors)``. The next call overwrites the tensors that are returned."""
        device = tensors[0].device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return function(what, tensors)
        if device not in self._streams:
            self._streams[device] = self._last[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = self._pool or torch.cuda.graph_pool_handle()
        key = (function, what, device, *((one.shape, one.stride(), one.dtype) for one in tensors))
        recording = self._recordings.get(key)  # once: the hash of a key takes long
        if recording is None:
            recording = Recording(function, what, tensors, self._streams[device], self._pool)
            self._recordings[key] = recording
        current = torch.cuda.current_stream(device)
        if current != self._last[device]:
            current.wait_stream(self._last[device])
            self._last[device] = current
        return recording(tensors)


class Recording:
    """One function for one kind of arguments. The first call runs it, so that its kernels are there when the second
    one records it."""

    def __init__(
        self, function: Function, what: Hashable, tensors: Sequence[Tensor], stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self._function, self._what, self._stream, self._pool = function, what, stream, pool
        self._inputs = [one.clone() for one in tensors]
        self._is_warm, self._waits_for_host = False, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the function returns for these tensors."""
        if self._waits_for_host:
            return self._function(self._what, tensors)
        copy_each(self._inputs, tensors)
        if not self._is_warm:
            return self._warm_up()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._found = self._function(self._what, self._inputs)
        self._graph.replay()
        return self._found

    def _warm_up(self) -> Any:
        """Run the function on the stream that records, and see whether it can be recorded."""
        current, asking = torch.cuda.current_stream(self._stream.device), HostWaits()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._function(self._what, self._inputs)  # tables that are made once are there from now on
            with asking:
                found = self._function(self._what, self._inputs)
        current.wait_stream(self._stream)
        self._is_warm, self._waits_for_host = True, bool(asking.operator)
        if asking.operator:
            warn(
                f"statistics of {self._what} take the host long: {asking.operator} waits for the host or reads its "
                "memory, so no CUDA graph replays them. It is called by the format's decode, encode or unrounded"
            )
        return found


aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
"""The dtypes of masks, whose elements are counted before an index by them has a size."""


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds operators that a CUDA graph cannot have: they wait for the host, or read its memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = ""
        """The first one; empty if there is none."""
        self._number: Tensor | None = None
        """The number of the host that was made a tensor last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is aten.lift_fresh.default:
            self._number = found
        copies = func is aten.copy_.default and args[1] is self._number  # an operator that takes it copies nothing
        if not self.operator and (copies or _waits(func, _tensors(args), _tensors(found))):
            self.operator = str(func)
        return found


def _waits(operator: Any, given: list[Tensor], found: list[Tensor]) -> bool:
    if torch.Tag.data_dependent_output in operator.tags:
        return True
    if torch.Tag.dynamic_output_shape in operator.tags:
        return operator is not aten.index.Tensor or any(one.dtype in MASKS for one in given[1:])
    if operator is aten.lift_fresh.default:  # what `torch.tensor` ends with: it has copied from the host
        return found[0].dim() > 0
    return len({one.device for one in (*given, *found) if one.dim() or operator is aten.copy_.default}) > 1


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]
