"""Unit: the weights that FSDP2 gathers together, whose gather is one plan. FSDP2 asks the weights of a unit one by one,
always in the same order, what they send: the first one checks all weights and chooses the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.gather_encoder import Encoders, GatherPlan, Sides, plan_of
from lpq.distributed.gather_loads import EncodedLoad, High, Ordinary, operands_of
from lpq.distributed.shard import WeightShard
from lpq.distributed.shard_statistics import stale
from lpq.distributed.weight_gather import Gather, Load
from lpq.kernels.table import kernels_allowed
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import SIGNATURE
from lpq.torch_private import fsdp

Traits = tuple["Sides | None", type, torch.dtype, torch.device]
"""The properties of a weight on which a plan depends: its operands; class, dtype and device of its shard."""


class UnitPlan(NamedTuple):
    """How the weights of a unit are gathered in one direction, or in both."""

    of: Sequence[Traits]
    loads: dict[Gather, Load]
    """Each load by the weight that sends it, in the order in which FSDP2 asks the weights."""
    places: Sequence[tuple[fsdp.Site, list[Tensor] | None, list[Tensor]]]
    """Where FSDP2 gathers each weight, and the tensors that it frees as well."""


class Unit:
    """Weights that FSDP2 gathers together, in the order of FSDP2's calls."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self.gathers = gathers
        self._sites = [gather.site for gather in gathers]
        self._models = [*{id(gather.model): gather for gather in reversed(gathers)}.values()]
        """The first weight of each model."""
        self._plans: dict[tuple[object, ...], UnitPlan] = {}
        """The plans, by the directions that are wanted and by what may run."""
        self.begun: dict[Gather, Load] | None = None
        """The loads of the gather that has begun, each by the weight that sends it, until the last has arrived."""
        self.encoders: Encoders = {}
        """The encoders of several of its shards; gathers for forward and for backward share them."""

    def begin(self, gather: Gather, shard: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to gather for a weight, when FSDP2 asks it."""
        if gather is self.gathers[0]:
            return self.begin_all(shard)
        if self.begun is None:
            raise RuntimeError(
                f"the weight of {gather.layer.title} is gathered together with the weight of "
                f"{self.gathers[0].layer.title}, in whose place somebody put an ordinary tensor after fully_shard: "
                "load weights by load_state_dict, or write to them in place"
            )
        return _pieces_of(self.begun[gather], shard) if gather in self.begun else ()

    def begin_all(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The same for the first weight, after which the others need not be looked at: check and measure all, and
        choose the plan; the first of its kind is made."""
        self.begun = None
        for first in self._models:
            model, comparison = first.model, first.model.comparison
            if model.lends:
                model.lend()
            if comparison.moving or not comparison.alike:
                model.check(first)
        shards = fsdp.shards(self._sites)
        for model in {id(gather.model): gather.model for gather in stale(self.gathers, shards)}.values():
            model.refresh()
        of: list[Traits] = []
        for gather, own in zip(self.gathers, shards, strict=True):
            measured, sides = gather.measured, None
            if isinstance(own, QuantizedTensor):
                sides = gather.stored_sides(own)
            elif measured is not None:
                sides = measured.sides
            of.append((sides, type(own), own.dtype, own.device))
            if type(own) is WeightShard and "fsdp_pre_all_gather" not in vars(own):
                vars(own)["fsdp_pre_all_gather"] = Hook(gather, own)
        again = tuple([gather.runs_again for gather in self.gathers])
        directions = self._sites[0].directions
        key = (*directions, again, kernels_allowed(), registry.epoch())
        plan = self._plans.get(key)
        if plan is None or plan.of != of:
            needs = [(directions[0] or runs, directions[1]) for runs in again]
            plan = self._plans[key] = self._make(of, shards, needs)
        fsdp.gather_into(plan.places)
        self.begun = plan.loads
        load = plan.loads.get(self.gathers[0])
        if load is None:
            return ()
        return load.begin(shards) if len(load.gathers) == len(shards) > 1 else _pieces_of(load, shard)

    def _make(self, of: Sequence[Traits], shards: Sequence[Tensor], needs: Sequence[tuple[bool, bool]]) -> UnitPlan:
        for gather, (sides, *_) in zip(self.gathers, of, strict=True):
            if gather.made_for != (sides, gather.site.dtype):
                self._plans.clear()
                self.encoders.clear()
                gather.make(sides, gather.site.dtype)
        loads: list[Load] = []
        together: list[tuple[Gather, Tensor, GatherPlan]] = []
        for gather, shard, each in zip(self.gathers, shards, needs, strict=True):
            dtype, ranks = gather.site.dtype, gather.site.group.size()
            if gather.operands is None:
                loads.append(Ordinary(gather, dtype))
                continue
            shape = tuple(gather.site.shape)
            plan = plan_of(operands_of(gather).sides, each, shape, dtype, ranks, isinstance(shard, QuantizedTensor))
            if plan.high:
                loads.append(High(gather, shard, plan))
            elif ranks == 1 or gather.site.offloaded:  # FSDP2 wants a tensor of each, or moves each shard by itself
                loads.append(EncodedLoad([gather], [shard], [plan], self.encoders if ranks > 1 else None))
            else:
                together.append((gather, shard, plan))
        if together:
            gathers, shards, plans = zip(*together, strict=True)
            loads.append(EncodedLoad(gathers, shards, plans, self.encoders))
        of_first = {load.gathers[0]: load for load in loads}
        by_gather = {gather: of_first[gather] for gather in self.gathers if gather in of_first}
        into = [(load.into, load.to_free) if (load := by_gather.get(g)) else ([], []) for g in self.gathers]
        return UnitPlan(of, by_gather, [(g.site, *where) for g, where in zip(self.gathers, into, strict=True)])


def _pieces_of(load: Load, shard: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a load sends, when FSDP2 asks the first of its weights; ``shard``: that one's."""
    return load.begin([shard] if len(load.gathers) == 1 else fsdp.shards(gather.site for gather in load.gathers))


class Hook:
    """FSDP2's hook as an attribute of a shard, which costs Python less than the method of its class. Views and copies
    of the shard have none."""

    __signature__ = SIGNATURE

    def __init__(self, gather: Gather, shard: WeightShard) -> None:
        self._gather, self._shard = weakref.ref(gather), weakref.ref(shard)  # no model is kept by its shards

    def __call__(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        gather, shard = self._gather(), self._shard()
        assert shard is not None
        unit = gather.unit if gather is not None else None
        usual = gather is getattr(module, "gather", None) and not torch.is_inference_mode_enabled()
        if gather is None or unit is None or not usual:
            return WeightShard.fsdp_pre_all_gather(shard, mesh, outer_size, outer_stride, module, mp_policy)
        if gather is unit.gathers[0]:
            return unit.begin_all(shard), gather
        if unit.begun is not None and gather not in unit.begun:
            return (), gather
        return unit.begin(gather, shard), gather
