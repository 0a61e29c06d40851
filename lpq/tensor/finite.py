"""Warnings of stored weights that a step has made NaN or infinite, once for each, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lpq.registry.showing import listed
from lpq.registry.warning import warn
from lpq.torch_private.operators import norm_of_each

if TYPE_CHECKING:
    from lpq.tensor.quantized_tensor import QuantizedTensor, Writes


class _Sums(NamedTuple):
    """Sums of the values that a step wrote to some weights."""

    weights: list[tuple[str, Writes]]
    sums: Tensor
    """Sums of absolute values: on the CPU, and complete once ``arrived`` has happened."""
    arrived: torch.Event | None


class Finite:
    """The written values that are still to be checked: where the host is ahead of a GPU, the values of the previous
    step."""

    def __init__(self) -> None:
        self._pending: list[_Sums] = []

    def check(self, targets: Sequence[QuantizedTensor], values: Sequence[Tensor]) -> None:
        """Warn of values that are not finite: now, or at the next call where a device has yet to compute them."""
        on: dict[torch.device, list[tuple[QuantizedTensor, Tensor]]] = {}
        for target, value in zip(targets, values, strict=True):
            on.setdefault(value.device, []).append((target, value))
        for device, pairs in on.items():
            if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                continue
            sums = torch.stack(norm_of_each([value for _, value in pairs], 1))
            event = None
            if device.type != "cpu":
                sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
                event = torch.Event(device)
                event.record()
            weights = [(target.title or f"a {list(target.shape)} tensor", target.writes) for target, _ in pairs]
            self._pending.append(_Sums(weights, sums, event))
        pending, self._pending = self._pending, []
        for of in pending:
            if of.arrived is None or of.arrived.query():
                _warn(of)
            else:
                self._pending.append(of)


def _warn(of: _Sums) -> None:
    if bool(of.sums.isfinite().all()):
        return
    names = []
    for (name, writes), finite in zip(of.weights, of.sums.isfinite().tolist(), strict=True):
        if not finite and not writes.warned:
            names.append(name)
            writes.warned = True
    if names:
        warn(
            f"the step of an optimizer made weights NaN or infinite that are stored quantized: {listed(names, 3)}. "
            "The gradients, or the updates that the optimizer computed, were not finite: clip "
            "or skip such gradients, and go on from the last checkpoint",
        )
