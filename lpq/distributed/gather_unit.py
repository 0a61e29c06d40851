"""Unit: the weights that FSDP2 gathers together, whose gather is one plan.

FSDP2 asks the weights of a unit one by one, always in the same order, what they send. The first one checks all of them
and chooses the plan; the first one of a load sends for all of it, and the others send nothing. Nothing that is made for
one gather is kept for another, so that an error between the two leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.gather_encoder import Sides, Way, way_of
from lpq.distributed.gather_loads import Encoded, High, Load, Ordinary, operands_of
from lpq.distributed.weight_gather import Gather
from lpq.kernels.table import kernels_allowed
from lpq.tensor import QuantizedTensor
from lpq.torch_private import fsdp

Traits = tuple["Sides | None", type, torch.dtype, torch.device]
"""The properties of a weight on which a plan depends: its operands; class, dtype and device of its shard."""


class Plan(NamedTuple):
    """How the weights of a unit are gathered in one direction, or in both."""

    of: Sequence[Traits]
    loads: dict[Gather, Load]
    """Each load by the weight that sends it."""
    last: Gather
    """The last weight that sends anything."""
    places: Sequence[tuple[fsdp.Site, list[Tensor] | None, list[Tensor]]]
    """Where FSDP2 gathers each weight, and what it frees beside."""


class Unit:
    """Weights that FSDP2 gathers together, in the order in which it asks them."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self.gathers = gathers
        self._sites = [gather.site for gather in gathers]
        self._models = [*{id(gather.model): gather for gather in reversed(gathers)}.values()]
        """The first weight of each model."""
        self._plans: dict[tuple[object, ...], Plan] = {}
        """The plans, by the directions that are wanted and by what may run."""
        self._begun: Plan | None = None
        """The plan of the gather that has begun, until it has finished."""

    def begin(self, gather: Gather, shard: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to gather for a weight, when FSDP2 asks it."""
        if gather is self.gathers[0]:
            self._begun = None
            self._begun = self._choose()
            fsdp.gather_into(self._begun.places)
        if self._begun is None:
            raise RuntimeError(
                f"the weight of {gather.layer.title} is gathered together with the weight of "
                f"{self.gathers[0].layer.title}, in whose place somebody put an ordinary tensor after fully_shard: "
                "load weights by load_state_dict, or write to them in place"
            )
        load = self._begun.loads.get(gather)
        if load is None:
            return ()
        return load.begin([shard] if len(load.gathers) == 1 else fsdp.shards(g.site for g in load.gathers))

    def finish(self, gather: Gather, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        """Make the whole weights of what arrived, when FSDP2 asks the weight that sent it; return the weight that it
        asks, and the tensors to free with it."""
        load = None
        if self._begun is not None and (load := self._begun.loads.get(gather)) is not None:
            load.finish()
            if gather is self._begun.last:
                self._begun = None
        if out is not None:
            return None
        if gather.operands is None:
            return outputs[0].reshape(-1), []
        return gather.whole(), load.held if load is not None else []

    def _choose(self) -> Plan:
        """Check and measure all weights, and return their plan; the first of its kind is made."""
        for gather in self._models:
            gather.model.check(gather)
        shards = fsdp.shards(self._sites)
        pairs = [*zip(self.gathers, shards, strict=True)]
        for gather, shard in pairs:
            if not isinstance(shard, QuantizedTensor) and gather.is_stale(shard):
                gather.model.refresh()
        of = [
            (g.stored_sides(s) if isinstance(s, QuantizedTensor) else g.sides, type(s), s.dtype, s.device)
            for g, s in pairs
        ]
        again = tuple([gather.runs_again for gather in self.gathers])
        directions = self._sites[0].directions(False)
        key = (*directions, again, kernels_allowed(), registry.epoch())
        plan = self._plans.get(key)
        if plan is None or plan.of != of:
            plan = self._plans[key] = self._make(of, shards, [(directions[0] or runs, directions[1]) for runs in again])
        return plan

    def _make(self, of: Sequence[Traits], shards: Sequence[Tensor], wanted: Sequence[tuple[bool, bool]]) -> Plan:
        for gather, (sides, *_) in zip(self.gathers, of, strict=True):
            if gather.made_for != (sides, gather.site.dtype):
                self._plans.clear()
                gather.make(sides, gather.site.dtype)
        loads: list[Load] = []
        together: list[tuple[Gather, Tensor, Way]] = []
        for gather, shard, each in zip(self.gathers, shards, wanted, strict=True):
            dtype, ranks = gather.site.dtype, gather.site.group.size()
            if gather.operands is None:
                loads.append(Ordinary(gather, dtype))
                continue
            shape = tuple(gather.layer.weight.shape)
            way = way_of(operands_of(gather).sides, each, shape, dtype, ranks, isinstance(shard, QuantizedTensor))
            if way.high:
                loads.append(High(gather, shard, way))
            elif ranks == 1 or gather.site.offloaded:  # FSDP2 wants a tensor of each, or moves each shard by itself
                loads.append(Encoded([gather], [shard], [way]))
            else:
                together.append((gather, shard, way))
        if together:
            loads.append(Encoded(*map(list, zip(*together, strict=True))))
        sent = {load.gathers[0]: load for load in loads}
        places = [(g.site, sent[g].into, sent[g].held) if g in sent else (g.site, [], []) for g in self.gathers]
        return Plan(of, sent, max(sent, key=self.gathers.index), places)
