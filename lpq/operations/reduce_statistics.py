"""Reductions of statistics over ranks: one MAX of those that cover data of several ranks, and one sum of counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.formats.layout import Stat
from lpq.torch_private.collectives import all_reduce
from lpq.torch_private.operators import copy_each

WITHOUT_SIGN = 0x7FFFFFFF
"""The bits of a float but for its sign."""
Owners: TypeAlias = "tuple[Any, ...]"
"""The layers or weights to which tensors belong; each has a ``title``."""
Parts: TypeAlias = "dict[tuple[Any, ...], tuple[ProcessGroup, list[tuple[Owners, Tensor]]]]"
"""Tensors to reduce together, and a group to do it in, by how they are reduced, the ranks of that and the device."""
Declared = tuple[Stat, int]
"""A statistic, and which dimension of its operand is divided over ranks: 0 of a row operand, 1 of a column operand."""


def spans(declared: Declared) -> bool:
    """Whether one element of the statistic covers data of several ranks."""
    stat, dim = declared
    return stat.block[dim] is None


def bind_reduction(
    needed: Sequence[Sequence[Declared]], group: ProcessGroup | str, number: int
) -> Callable[[Sequence[list[Tensor]], Tensor | None], Tensor | None]:
    """``reduce(stats, seeds)``: reduce the statistics of a round that span ranks, of several tensors, in one collective
    for MAX and one for sums; the lists are changed in place. It returns common seeds, which the first collective makes
    of the seeds of all ranks: the halves of a seed are reduced apart, as any mixture of seeds is a seed."""
    each = [_spanning(declared, number) for declared in needed]
    largest, counts = ([(tensor, i) for tensor, places in enumerate(each) for i in places[how]] for how in (0, 1))

    def reduce(stats: Sequence[list[Tensor]], seeds: Tensor | None) -> Tensor | None:
        halves = [] if seeds is None else [seeds.view(torch.int32)]
        values = reduce_max([*halves, *(stats[tensor][i] for tensor, i in largest)], group)
        common = values.pop(0).clone().view(torch.int64) if halves else None
        if counts:
            values += reduce_sum([stats[tensor][i] for tensor, i in counts], group)
        for (tensor, i), value in zip([*largest, *counts], values, strict=True):
            stats[tensor][i] = value
        return common

    return reduce


def _spanning(declared: Sequence[Declared], number: int) -> tuple[list[int], list[int]]:
    """The places of the statistics of a round whose elements span ranks: of statistics for MAX, and of counts."""
    places = [(i, stat.reduce) for i, (stat, dim) in enumerate(declared) if spans((stat, dim)) and stat.round == number]
    return [i for i, how in places if how == "max"], [i for i, how in places if how == "sum"]


def reduce_max(values: Sequence[Tensor], group: ProcessGroup | str, *, signed: bool = False) -> list[Tensor]:
    """Return the MAX over ranks of these fp32 tensors, in one collective. The bits are reduced, as integers: a
    floating-point MAX may lose a NaN, while the bits of non-negative floats order as the floats do, with NaN above
    infinity. ``signed``: values may be negative. The first tensor may hold 32-bit integers.
    """
    if not values:
        return []
    # A view is an operator and a reshape is two, and a step reduces the states of all layers: none without need.
    flat = [v if v.dim() == 1 else v.view(-1) if v.is_contiguous() else v.reshape(-1) for v in values]
    whole = [v for v in flat if v.dtype == torch.int32]
    floats = [v for v in flat if v.dtype != torch.int32]
    if floats and signed:
        of_nan_without_sign = torch.cat(floats).nan_to_num(torch.nan, torch.inf, -torch.inf)
        whole.append(_in_order(of_nan_without_sign.view(torch.int32)))
    elif floats:
        whole.append(torch.cat(floats).view(torch.int32) & WITHOUT_SIGN)
    maxima = all_reduce(torch.cat(whole) if len(whole) > 1 else whole[0], "max", _name(group))
    maxima = _in_order(maxima) if signed else maxima
    parts = torch.split(maxima.view(torch.float32), [v.numel() for v in values])
    shaped = [part if v.dim() == 1 else part.view(v.shape) for part, v in zip(parts, values, strict=True)]
    return [part if v.dtype == part.dtype else part.view(v.dtype) for part, v in zip(shaped, values, strict=True)]


def _in_order(bits: Tensor) -> Tensor:
    """The bits of floats as integers that order as the floats do; and back."""
    return bits ^ ((bits >> 31) & WITHOUT_SIGN)


def reduce_sum(values: Sequence[Tensor], group: ProcessGroup | str) -> list[Tensor]:
    """Return the sum over ranks of these tensors of counts, in one collective."""
    if not values:
        return []
    flat = torch.cat([v.reshape(-1) for v in values])
    parts = torch.split(all_reduce(flat, "sum", _name(group)), [v.numel() for v in values])
    return [part.view(v.shape) for part, v in zip(parts, values, strict=True)]


def _name(group: ProcessGroup | str) -> str:
    return group if isinstance(group, str) else group.group_name


class Reductions:
    """Tensors to reduce over ranks, by MAX or, for counts, by their sum: one collective for each set of ranks, each
    device and each of the two."""

    def __init__(self, compare: Callable[[Parts], None] | None = None) -> None:
        """``compare``: called before anything is reduced; it raises where ranks would not reduce the same."""
        self._parts: Parts = {}
        self._afterwards: list[Callable[[], None]] = []
        self._ranks: dict[ProcessGroup, tuple[int, ...]] = {}
        self._compare = compare

    def add_stats(
        self, declared: Sequence[Declared], stats: Sequence[Tensor], group: ProcessGroup, number: int, owners: Owners
    ) -> None:
        """Reduce in place those statistics of a round whose elements span the ranks."""
        for how, places in zip(("max", "sum"), _spanning(declared, number), strict=True):
            self.add([stats[i] for i in places], group, [owners] * len(places), how)

    def add(self, values: Sequence[Tensor], group: ProcessGroup, owners: Sequence[Owners], how: str = "max") -> None:
        """Reduce these in place over ``group``, by MAX or, if ``how`` says so, their sum. ``owners``: of each."""
        if not values or group.size() == 1:
            return
        ranks = self._ranks.get(group)
        if ranks is None:
            import torch.distributed as dist

            ranks = self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        for value, own in zip(values, owners, strict=True):
            self._parts.setdefault((how, ranks, value.device), (group, []))[1].append((own, value))

    def afterwards(self, call: Callable[[], None]) -> None:
        """Register a function to call once all are reduced; it is not called if something raises before."""
        self._afterwards.append(call)

    @torch.no_grad()
    def run(self) -> None:
        if self._compare is not None:
            self._compare(self._parts)
        for (how, *_), (group, parts) in sorted(self._parts.items(), key=lambda part: part[0][0]):
            values = [value for _, value in parts]
            copy_each(values, reduce_max(values, group, signed=True) if how == "max" else reduce_sum(values, group))
        for call in self._afterwards:
            call()
