"""Unit: the weights that FSDP2 gathers together, whose gather is one plan.

FSDP2 asks the weights of a unit one by one, always in the same order, what they send. The first one checks all of them
and chooses the plan; the first one of a load sends for all of it, and the others send nothing. Nothing that is made for
one gather is kept for another, so that an error between the two leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.gather_encoder import Sides, Way, way_of
from lpq.distributed.gather_loads import Encoded, High, Load, Ordinary, operands_of
from lpq.distributed.shard import WeightShard
from lpq.distributed.weight_gather import Gather, stale
from lpq.kernels.table import kernels_allowed
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import SIGNATURE
from lpq.torch_private import fsdp

Traits = tuple["Sides | None", type, torch.dtype, torch.device]
"""The properties of a weight on which a plan depends: its operands; class, dtype and device of its shard."""


class Plan(NamedTuple):
    """How the weights of a unit are gathered in one direction, or in both."""

    of: Sequence[Traits]
    loads: dict[Gather, Load]
    """Each load by the weight that sends it, in the order in which FSDP2 asks them."""
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
        self.begun: dict[Gather, Load] | None = None
        """The loads of the gather that has begun, each by the weight that sends it, until the last has arrived."""

    def begin(self, gather: Gather, shard: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to gather for a weight, when FSDP2 asks it."""
        if gather is self.gathers[0]:
            self.begun = None
            plan = self._choose()
            fsdp.gather_into(plan.places)
            self.begun = plan.loads
        if self.begun is None:
            raise RuntimeError(
                f"the weight of {gather.layer.title} is gathered together with the weight of "
                f"{self.gathers[0].layer.title}, in whose place somebody put an ordinary tensor after fully_shard: "
                "load weights by load_state_dict, or write to them in place"
            )
        load = self.begun.get(gather)
        if load is None:
            return ()
        return load.begin([shard] if len(load.gathers) == 1 else fsdp.shards(g.site for g in load.gathers))

    def finish(self, gather: Gather, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        """Make the whole weights of what arrived, when FSDP2 asks the weight that sent it; return the weight that it
        asks, and the tensors to free with it."""
        load = None
        if self.begun is not None and (load := self.begun.get(gather)) is not None:
            load.finish()
            if gather is next(reversed(self.begun)):
                self.begun = None
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
        for model in {id(gather.model): gather.model for gather in stale(self.gathers, shards)}.values():
            model.refresh()
        of: list[Traits] = []
        for gather, shard in zip(self.gathers, shards, strict=True):
            measured, sides = gather.measured, None
            if isinstance(shard, QuantizedTensor):
                sides = gather.stored_sides(shard)
            elif measured is not None:
                sides = measured.sides
            of.append((sides, type(shard), shard.dtype, shard.device))
            if type(shard) is WeightShard and "fsdp_pre_all_gather" not in vars(shard):
                vars(shard)["fsdp_pre_all_gather"] = Hook(gather, shard)
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
        of_first = {load.gathers[0]: load for load in loads}
        sent = {gather: of_first[gather] for gather in self.gathers if gather in of_first}
        places = [(g.site, sent[g].into, sent[g].held) if g in sent else (g.site, [], []) for g in self.gathers]
        return Plan(of, sent, places)


class Hook:
    """FSDP2's hook as an attribute of a shard, which costs Python less than the method of its class. It answers at once
    for a shard for which another one sends, and calls that method otherwise. Views and copies of the shard have none.
    """

    __signature__ = SIGNATURE

    def __init__(self, gather: Gather, shard: WeightShard) -> None:
        self._gather, self._shard = weakref.ref(gather), weakref.ref(shard)  # no model is kept by its shards

    def __call__(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        gather = self._gather()
        begun = gather.unit.begun if gather is not None and gather.unit is not None else None
        if begun is not None and gather not in begun and getattr(module, "gather", None) is gather:
            return (), gather
        shard = self._shard()
        assert shard is not None
        return WeightShard.fsdp_pre_all_gather(shard, mesh, outer_size, outer_stride, module, mp_policy)
