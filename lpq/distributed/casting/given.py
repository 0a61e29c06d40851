"""The arguments of a cast, refused in words if they make no sense.

All ranks pass the same weights, so wrong ones are refused at once: all ranks do so, and none waits. One rank alone may
pass a wrong part of a master, a wrong state or a wrong seed: these are refused once the other ranks have the news.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lpq.distributed.casting.fragments import Span
from lpq.distributed.casting.kinds import Item
from lpq.formats import Quantizer
from lpq.kernels.host_to_device import on_device
from lpq.operations.argument_checks import check_seed, is_seed, signed, state_of
from lpq.operations.derived_operands import rounds_stochastically
from lpq.tensor import QuantizedTensor


def items_of(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    states: Sequence[Mapping[str, Tensor] | None] | None,
    seed: Tensor | int | None,
    ranks: int,
) -> list[Item]:
    """The weights, each with the fragment that this rank owns."""
    given = {"weights": len(weights), "masters": len(masters), "offsets": len(offsets)}
    if states is not None:
        given["states"] = len(states)
    if len(set(given.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in given.items())
        raise ValueError(f"cast_master_weights: {counts}: pass one of each for every weight")
    for i, weight in enumerate(weights):
        _check_weight(i, weight, weights[0].device)
    seeds = _seeds(seed if is_seed(seed) else None, len(weights), weights[0].device) if weights else []
    items: list[Item] = []
    for i, weight in enumerate(weights):
        state = states[i] if states is not None else None
        fault: Exception | None = None
        try:
            _check_seed(i, weight.quantizer, seed)
            remembered = _memory(i, weight, state)
            values, span = _fragment(i, weight, masters[i], offsets[i], ranks)
        except (TypeError, ValueError) as error:
            if ranks == 1:
                raise
            # In its place goes an empty fragment, so that this rank sends as many words as the others.
            remembered = (weight.quantizer.new_state(weight.device) or None) if state else None
            fault, (values, span) = error, _fragment(i, weight, None, 0, ranks)
        items.append(Item(i, weight, values, span, remembered, seeds[i], fault))
    return items


def _seeds(seed: Tensor | int | None, count: int, device: torch.device) -> Sequence[Tensor | None]:
    """One seed for each weight."""
    if seed is None:
        return [None] * count
    if isinstance(seed, Tensor):
        return (seed.to(device, torch.int64) + torch.arange(count, device=device)).unbind()
    return on_device([signed(seed + i) for i in range(count)], torch.int64, device).unbind()


def _check_weight(i: int, weight: QuantizedTensor, device: torch.device) -> None:
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(
            f"weights[{i}] is a {type(weight).__name__}: masters are cast into whole quantized tensors, "
            "such as Quantizer.quantize makes"
        )
    if weight.window is not None and not weight.window.apart:
        raise ValueError(
            f"weights[{i}] is a view that shares values with the rest of a tensor {list(weight.window.whole.shape)}: "
            "pass that tensor, and its master"
        )
    if weight.amax_group is not None and (weight.amax_group == "unattached" or weight.amax_group.size() > 1):
        raise ValueError(
            f"weights[{i}] is a shard of a weight, which copy_ writes to: masters are cast into weights that every "
            "rank holds whole"
        )
    if weight.device != device:
        raise ValueError(
            f"weights[{i}] is on {weight.device}, and weights[0] on {device}: all are cast with one collective, "
            "so pass the weights of one device at a time"
        )


def _check_seed(i: int, quantizer: Quantizer, seed: Tensor | int | None) -> None:
    check_seed(seed)
    if seed is None and rounds_stochastically(quantizer):
        raise ValueError(
            f"weights[{i}]: {quantizer} rounds stochastically, and all ranks must draw the same random bits: "
            "pass seed=, the same on all ranks and another one in each step"
        )


def _memory(i: int, weight: QuantizedTensor, state: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """The checked state of a weight; None if its quantizer remembers nothing, or no state was passed."""
    quantizer = weight.quantizer
    remembered = state_of(quantizer, state, weight.device, f"states[{i}]", "the masters") if state else {}
    if not remembered:
        return None
    if quantizer.col_source == "row" and quantizer.side("col").state:
        raise ValueError(
            f"states[{i}]: {quantizer.side('col')} would remember statistics of what the row operand decodes to, "
            "which are known after the gather only: pass None to encode with the statistics of the masters"
        )
    return remembered


def _fragment(i: int, weight: QuantizedTensor, master: Tensor | None, offset: int, ranks: int) -> tuple[Tensor, Span]:
    """The elements of a master that this rank owns, and where they lie."""
    total = weight.numel()
    if master is None or (isinstance(master, Tensor) and not master.numel()):
        master, offset = torch.empty(0, dtype=torch.float32, device=weight.device), 0
    if not isinstance(master, Tensor) or master.dtype != torch.float32 or master.dim() != 1:
        what = f"{master.dtype} {list(master.shape)}" if isinstance(master, Tensor) else type(master).__name__
        raise TypeError(
            f"masters[{i}] is {what}: pass the elements that this rank owns as a 1-D fp32 tensor, or None if it "
            "owns nothing of this weight"
        )
    if master.device != weight.device:
        raise ValueError(f"masters[{i}] is on {master.device}, and its weight on {weight.device}: move one of them")
    if not isinstance(offset, int):
        raise TypeError(
            f"offsets[{i}] is a {type(offset).__name__}: pass the place of this rank's first element, an int"
        )
    span = (offset, offset + len(master))
    if not 0 <= span[0] <= span[1] <= total:
        raise ValueError(
            f"masters[{i}] are elements [{span[0]}, {span[1]}) of a weight {list(weight.shape)}, which has {total}: "
            "offsets count from the first element of the weight, not of a buffer that holds many"
        )
    if ranks == 1 and span != (0, total):
        raise ValueError(
            f"masters[{i}] are elements [{span[0]}, {span[1]}) of {total}, and the others are on other ranks: "
            "pass group=, the process group that shares out the masters"
        )
    return master.detach(), span
