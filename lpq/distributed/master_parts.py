"""The arguments of a cast of masters: refused on all ranks if they make no sense on one, or differ between ranks.

Ranks exchange objects for that. The host waits for it in each cast; in return every difference has words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.distributed.ranks import Ranks
from lpq.formats import Quantizer
from lpq.kernels.host_to_device import captured
from lpq.operations.argument_checks import check_seed, signed, state_of
from lpq.operations.derived_operands import rounds_stochastically
from lpq.tensor import QuantizedTensor

Span = tuple[int, int]
"""Elements ``[start, stop)`` of a flattened weight."""
States = Sequence[Mapping[str, Tensor] | None]


@dataclass(frozen=True, eq=False)
class MasterPart:
    """One weight, and the part of its master that this rank owns."""

    index: int
    weight: QuantizedTensor
    values: Tensor
    """The elements ``span`` of the flattened master, in fp32."""
    span: Span
    state: Mapping[str, Tensor] | None
    seed: Tensor | None

    @property
    def sides(self) -> tuple[Quantizer | None, Quantizer | None]:
        """The quantizers of the operands that the weight holds."""
        row, col = self.weight.row, self.weight.col
        return None if row is None else row.quantizer, None if col is None else col.quantizer

    def matrix(self) -> Tensor:
        """The whole master as a matrix, with zeros for the elements of other ranks."""
        flat = self.values.new_zeros(self.weight.numel())
        flat[slice(*self.span)] = self.values
        return flat.view(self.weight.matrix_shape)


def agreed_parts(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    group: ProcessGroup | None,
    states: States | None,
    seed: Tensor | int | None,
) -> list[MasterPart]:
    """The parts that this rank owns, once all ranks of the group know that they make the same cast. Ranks do not ask
    each other while a CUDA graph is recorded."""
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group of the masters' shards: only its members may cast them")
    parts: list[MasterPart] = []

    def spans_of_parts() -> list[Span]:
        parts.extend(_parts(weights, masters, offsets, states, seed))
        return [part.span for part in parts]

    if group is None or group.size() == 1:
        every = [spans_of_parts()]
    elif any(isinstance(weight, Tensor) and captured(weight.device) for weight in weights[:1]):
        spans_of_parts()
        return parts
    else:
        ranks = Ranks(group)
        every = ranks.all(spans_of_parts)
        random = seed is not None and any(rounds_stochastically(part.weight.quantizer) for part in parts)
        seeds = [f"seed {signed(int(seed))}"] if seed is not None and random else []
        ranks.equal(
            [*map(_described, parts), *seeds],
            "the ranks did not pass the same weights and seed, so nothing was cast",
            "Pass the same on all of them, in the same order, each with a state or without",
            "no weight",
        )
    for part, spans in zip(parts, zip(*every, strict=True), strict=True):
        _check_cover(part, spans)
    return parts


# ---------------------------------------------------------------------------------- what ranks must have in common


def _described(part: MasterPart) -> str:
    weight = part.weight
    operands = " and ".join(direction for direction, _ in weight.operands)
    remembers = ", with a state" if part.state is not None else ""
    return f"weights[{part.index}]: {weight.quantizer} {[*weight.shape]} of {weight.dtype}, {operands}{remembers}"


def _check_cover(part: MasterPart, spans: Sequence[Span]) -> None:
    """Refuse parts that leave out elements of a master or overlap."""
    at, total = 0, part.weight.numel()
    for start, stop in sorted([*(span for span in spans if span[0] < span[1]), (total, total)]):
        if start != at:
            who, first, last = ("no rank", at, start) if start > at else ("more than one rank", start, min(at, stop))
            raise ValueError(
                f"{who} of the group owns elements [{first}, {last}) of masters[{part.index}], whose weight "
                f"{[*part.weight.shape]} has {total}: together they must own each element once. For shards on other "
                "ranks pass group="
            )
        at = stop


# ---------------------------------------------------------------------------------- what one rank was given


def _parts(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    states: States | None,
    seed: Tensor | int | None,
) -> list[MasterPart]:
    numbers = {"weights": len(weights), "masters": len(masters), "offsets": len(offsets)}
    if states is not None:
        numbers["states"] = len(states)
    if len({*numbers.values()}) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in numbers.items())
        raise ValueError(f"cast_master_weights: {counts}: pass one of each for every weight")
    check_seed(seed)
    parts: list[MasterPart] = []
    for i, (weight, master, offset) in enumerate(zip(weights, masters, offsets, strict=True)):
        _check_weight(i, weight, weights[0].device)
        if seed is None and rounds_stochastically(weight.quantizer):
            raise ValueError(
                f"weights[{i}]: {weight.quantizer} rounds stochastically, and all ranks must draw the same random "
                "bits: pass seed=, the same on all ranks and another one in each step"
            )
        own = states[i] if states is not None else None
        state = state_of(weight.quantizer, own, weight.device, f"states[{i}]", "the masters") if own else {}
        values = _values(i, weight, master)
        span = _span(i, weight, len(values), offset)
        parts.append(MasterPart(i, weight, values, span, state or None, _seed(seed, i, weight.device)))
    return parts


def _seed(seed: Tensor | int | None, i: int, device: torch.device) -> Tensor | None:
    if isinstance(seed, Tensor):
        return seed.to(device, torch.int64) + i
    # Not a copy of the host's number, which a CUDA graph could not record.
    return None if seed is None else torch.full((), signed(seed + i), dtype=torch.int64, device=device)


def _check_weight(i: int, weight: QuantizedTensor, device: torch.device) -> None:
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(
            f"weights[{i}] is a {type(weight).__name__}: masters are cast into whole quantized tensors, "
            "such as Quantizer.quantize makes"
        )
    window, why = weight.window, None
    if weight.is_stack:
        why = f"a stack of {len(weight)} matrices, as of experts: masters are cast into single matrices"
    elif window is not None and not window.apart:
        why = f"a view that shares values with the rest of a tensor {list(window.whole.shape)}: pass that tensor"
    elif weight.amax_group is not None and (weight.amax_group == "unattached" or weight.amax_group.size() > 1):
        why = "a shard of a weight, which copy_ writes to: masters are cast into weights that every rank holds whole"
    elif weight.device != device:
        why = f"on {weight.device}, and weights[0] on {device}: pass the weights of one device at a time"
    if why is not None:
        raise ValueError(f"weights[{i}] is {why}")


def _values(i: int, weight: QuantizedTensor, master: Tensor | None) -> Tensor:
    """The elements of a master that this rank owns."""
    if master is None or (isinstance(master, Tensor) and not master.numel()):
        return torch.empty(0, dtype=torch.float32, device=weight.device)
    if not isinstance(master, Tensor) or master.dtype != torch.float32 or master.dim() != 1:
        what = f"{master.dtype} {list(master.shape)}" if isinstance(master, Tensor) else type(master).__name__
        raise TypeError(
            f"masters[{i}] is {what}: pass the elements that this rank owns as a 1-D fp32 tensor, or None if it "
            "owns nothing of this weight"
        )
    if master.device != weight.device:
        raise ValueError(f"masters[{i}] is on {master.device}, and its weight on {weight.device}: move one of them")
    return master.detach()


def _span(i: int, weight: QuantizedTensor, count: int, offset: int) -> Span:
    """The place of ``count`` elements in the flattened weight."""
    if not isinstance(offset, int):
        raise TypeError(
            f"offsets[{i}] is a {type(offset).__name__}: pass the place of this rank's first element, an int"
        )
    start, stop = (offset, offset + count) if count else (0, 0)
    if not 0 <= start <= stop <= weight.numel():
        raise ValueError(
            f"masters[{i}] are elements [{start}, {stop}) of a weight {list(weight.shape)}, which has "
            f"{weight.numel()}: offsets count from the first element of the weight, not of a buffer that holds many"
        )
    return start, stop
