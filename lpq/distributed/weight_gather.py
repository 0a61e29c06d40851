"""Gather: the statistics of a weight that FSDP2 gathers in its quantized form, and the tensors that gathers fill.

The unit gathers (``gather_unit.py``): FSDP2 gathers all weights of a unit together.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.distributed.alike import Comparison
from lpq.distributed.gather_encoder import Sides, sides_of
from lpq.distributed.gathered_operand import GatheredOperand
from lpq.distributed.several_matrices import Scratch
from lpq.distributed.shard import plain
from lpq.distributed.shard_groups import attach
from lpq.distributed.shardability import part_of, why_not, why_not_of_shards, why_uncut
from lpq.formats import Quantizer
from lpq.formats.sections import is_stack
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import made_at_use
from lpq.operations.states import Recall, bind_recall
from lpq.tensor import QuantizedTensor
from lpq.torch_private import autograd, fsdp
from lpq.torch_private.operators import copy_each


class GatheredLayer(Protocol):
    """A layer, as far as the gather of its weight reads it."""

    weight: Tensor
    gather: Gather | None
    passes: Any
    """Its ``fresh`` are the tensors that are encoded as they are measured, since their states are empty."""

    @property
    def title(self) -> str:
        """The name of the layer in messages."""

    def weight_quantizer(self) -> Quantizer | None:
        """The quantizer of the weight at this step; None: it stays in high precision."""

    def states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The statistics of each tensor that its quantizer remembers across steps."""


class GatheredModel(Protocol):
    """The model of a weight, as far as a gather reads it."""

    comparison: Comparison
    lends: bool
    """Whether buffers that are freed must hold memory while torch compiles."""
    scratch: Scratch
    """Memory for operands of its shards that are sent and then forgotten."""

    def lend(self) -> None:
        """Have that done."""

    def check(self, gather: Gather) -> None:
        """Raise, before this gather, unless all ranks have the same model; a collective, where that is in doubt."""

    def refresh(self) -> None:
        """Measure every weight of the unit that was written to; a collective."""


class Load(ABC):
    """Weights of a unit that send together, in FSDP2's hook of the first weight."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self.gathers = gathers
        self.into: list[Tensor] | None = None
        """The flat tensors in which the load arrives; None: FSDP2's own."""
        self.to_free: list[Tensor] = []
        """The tensors that FSDP2 frees beside these. It holds this very list, which is empty while FSDP2 allocates."""

    @abstractmethod
    def begin(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors to send for these shards, as many as there are in ``into``."""

    def finish(self) -> None:  # noqa: B027
        """Make the whole weights of what arrived; by default it is the whole weight."""


class GatheringUnit(Protocol):
    """The weights that FSDP2 gathers together, as a weight sees its unit."""

    gathers: Sequence[Gather]
    begun: dict[Gather, Load] | None
    """The loads of the gather that has begun, each by the weight that sends it, until the last has arrived."""

    def begin(self, gather: Gather, shard: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to gather for this weight, and for the others that send with it."""

    def begin_all(self, shard: Tensor) -> tuple[Tensor, ...]:
        """As ``begin``, for the first weight of the unit."""


Copies = list[tuple[Tensor, Tensor]]
"""Tensors, each with the one that is to be copied over it."""


class GatheredOperands(NamedTuple):
    """The operands that gathers of a weight fill."""

    sides: Sides
    dtype: torch.dtype
    """The dtype of the whole weight."""
    row: GatheredOperand
    col: GatheredOperand | None
    """None: it is made of the row operand where it is multiplied (``made_at_use``)."""

    @property
    def large(self) -> list[Tensor]:
        """The buffers that have memory only while the weight is gathered."""
        return self.row.large if self.col is None else [*self.row.large, *self.col.large]


class Measured(NamedTuple):
    """The last measurement: its tensor, the writes to that until then, and the quantizer."""

    local: weakref.ref[Tensor]
    writes: tuple[int, int]
    """The writes that the tensor's operators counted, and the writes that autograd counted."""
    quantizer: Quantizer | None
    sides: Sides | None


class Judged(NamedTuple):
    """The decisions that follow from the recipe of a layer."""

    quantizer: Quantizer | None
    """The quantizer that it wants for its weight."""
    sides: Sides | None
    """The operands of the gathered weight; None: it is gathered in high precision."""


class Gather:
    """How one weight is gathered. FSDP2 calls ``begin`` before a gather and ``finish`` after it."""

    site: fsdp.Site
    model: GatheredModel

    def __init__(self, layer: GatheredLayer, rounded: bool = False) -> None:
        self.layer, self.rounded = layer, rounded
        """Whether ``lpq.convert`` stored the weight quantized, and dropped the values that it had."""
        self.unit: GatheringUnit | None = None
        """The weights that FSDP2 gathers together with it, itself among them."""
        self.stats: list[Tensor | None] = []
        """Statistics of the whole weight that reach beyond a shard or are remembered, in the order of ``declared``."""
        self.spanning: list[Tensor | None] = []
        """The tensors of ``stats`` that reach beyond a shard; None in place of the others."""
        self._own_stats: list[Tensor] = []
        """The tensors of statistics that are measured for this weight by itself."""
        self.measured: Measured | None = None
        self.version: object = None
        """Another object once the values of the shard, or the statistics to encode it with, may be others."""
        self.runs_again = self._checkpointed = False
        """Whether forward runs again in backward, which then needs the row operand too."""
        self.operands: GatheredOperands | None = None
        """The operands that gathers fill; None: the weight is gathered in high precision."""
        self.made_for: tuple[Sides | None, torch.dtype] | None = None
        """The sides and the dtype of the operands."""
        self.judged: Judged | None = None
        """The last decisions; None once the recipe has changed."""
        self._state_stats: list[Tensor | None] = []
        """The statistics of earlier steps that forward recalled."""
        self._recall: Recall | None = None
        """Finds them in the state of the layer; None: nothing is remembered."""

    def shard_by(self, site: fsdp.Site, model: GatheredModel, checkpointed: bool) -> None:
        """Take the place at which FSDP2 shards the weight; ``checkpointed``: whether the layer runs again in
        backward."""
        self.site, self.model, self.runs_again, self._checkpointed = site, model, checkpointed, checkpointed

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin anew: a copy, or one from a file, has its own model, which may be sharded differently."""
        return Gather, (self.layer, self.rounded)

    def note(self) -> None:
        """Note, as forward begins, whether it is one of activation checkpointing, which runs it again in backward."""
        self.runs_again = self._checkpointed or not torch.is_grad_enabled() or autograd.hooks_that_save() is not None

    def attached(self) -> ProcessGroup:
        """The group that shards the weight. It is attached to this rank's shard, if that is stored quantized."""
        attach(self.site.param)
        return self.site.group

    def begin(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The tensors that FSDP2 is to gather."""
        assert self.unit is not None
        return self.unit.begin(self, shard)

    def finish(self, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        """Make the whole weights of the tensors that arrived, if this weight sent for them. Return this whole weight,
        and the tensors to free with it. FSDP2 passes it as ``out`` at later gathers, to be filled."""
        unit, load = self.unit, None
        assert unit is not None
        if unit.begun is not None and (load := unit.begun.get(self)) is not None:
            load.finish()
            if self is next(reversed(unit.begun)):
                unit.begun = None
        if out is not None:
            return None
        if self.operands is None:
            return outputs[0].reshape(-1), []
        return self.whole(), load.to_free if load is not None else []

    @cached_property
    def where(self) -> tuple[torch.dtype, torch.device, ProcessGroup]:
        """The dtype and the device of the whole weight, and the ranks over which it is sharded."""
        return self.site.dtype, self.site.device, self.site.group

    # ------------------------------------------------------------------------------ the quantizer

    def judge(self) -> Judged:
        """Decide by the present recipe how the weight is gathered."""
        quantizer, sides = self.layer.weight_quantizer(), None
        if quantizer is not None and self.why_whole(quantizer) is None:
            sides = sides_of(quantizer, is_stack(self.layer.weight.shape))
        self.judged = Judged(quantizer, sides)
        return self.judged

    @cached_property
    def cut(self) -> Cut | None:
        """How tensor parallelism divides the weight, of which FSDP2 gathers one part; None: it does not."""
        return part_of(self.site)

    def why_whole(self, quantizer: Quantizer) -> str | None:
        """Why the weight cannot be gathered quantized; None if it can."""
        shape = self.site.shape
        reason = self.site.refusal or why_not(quantizer, shape[0], self.site.group.size(), is_stack(shape))
        return reason if reason is not None or self.cut is None else why_not_of_shards(self.cut, quantizer)

    def stored_sides(self, shard: QuantizedTensor) -> Sides:
        """The operands of a stored weight, whose quantizer must be the recipe's."""
        attach(self.site.param)
        quantizer = self.layer.weight_quantizer()
        if quantizer != shard.quantizer:
            raise ValueError(
                f"the weight of {self.layer.title} is stored as {shard.quantizer} and its recipe wants {quantizer}: a "
                "weight that is stored quantized keeps its format; convert with weights='high_precision' to change it"
            )
        shape, ranks = self.site.shape, self.site.group.size()
        reason = self.site.refusal or why_uncut(shard.quantizer, shape[0], ranks, is_stack(shape))
        if reason is not None:
            raise ValueError(
                f"the weight of {self.layer.title} is stored as {shard.quantizer} and cannot be gathered so: {reason}; "
                "give lpq.convert(…, ranks=…) the number of ranks, or convert with weights='high_precision'"
            )
        return sides_of(shard.quantizer, is_stack(shard.shape))

    # ------------------------------------------------------------------------------ the statistics

    def prepared(self, shard: Tensor) -> Tensor:
        """The shard, on the device where it is encoded. FSDP2 would gather an ordinary parameter in ``site.dtype``, so
        the shard's values are rounded to that: here if they move to another device, else by the kernels that read
        them."""
        x = plain(shard)
        return x if x.device == self.site.device else x.to(self.site.device, self.site.dtype, non_blocking=True)

    def keep(self, stats: list[Tensor]) -> list[Tensor]:
        """These statistics, in the same tensors each time: a CUDA graph that was recorded before reads them there."""
        if [_kind(stat) for stat in stats] != [_kind(stat) for stat in self._own_stats]:
            self._own_stats = stats
        elif stats:
            copy_each(self._own_stats, stats)
        return self._own_stats

    def statistics(
        self, matrices: slice | None = None, copies: Copies | None = None, for_backward: bool | None = None
    ) -> list[Tensor | None]:
        """The statistics to encode with: from the state of the layer, or else as measured for the whole weight; None
        where a statistic covers only values of the encoded matrix. Backward encodes with the statistics of the latest
        forward, even if another backward changed the layer's state in between. ``matrices``: the matrices of a stack
        that are encoded. ``copies``: a list for the copies that must be made before the statistics are read, so that
        the copies of several weights take one launch; None: they are made at once. ``for_backward``:
        ``site.for_backward``, where the caller has read it."""
        assert self.operands is not None
        if self._recall is None:
            return self.spanning
        if not self._state_stats or not (self.site.for_backward if for_backward is None else for_backward):
            if not (state := self.layer.states().get("w")):
                return self.spanning
            recalled = self._recall(None, state, None)
            if "w" in self.layer.passes.fresh:
                recalled = [None if k is None else s for k, s in zip(recalled, self.stats, strict=True)]
            if not self._state_stats:  # launches are bound to where they lie
                self._state_stats = [None if k is None else torch.empty_like(k.contiguous()) for k in recalled]
            both = zip(self._state_stats, recalled, strict=True)
            pairs = [(own, k) for own, k in both if own is not None and k is not None]
            self.version = object()
            if copies is None:
                copy_pairs(pairs)
            else:
                copies += pairs
        recalled = [k if k is None or matrices is None else k[matrices] for k in self._state_stats]
        return [s if k is None else k for k, s in zip(recalled, self.spanning, strict=True)]

    # ------------------------------------------------------------------------------ the tensors that gathers fill

    def make(self, sides: Sides | None, dtype: torch.dtype) -> None:
        """Make the tensors that gathers fill."""
        if self.site.reshards_to_fewer_ranks:
            raise ValueError(
                f"{self.layer.title}: fully_shard(reshard_after_forward=…) with a number of ranks: FSDP2 supports that "
                "for ordinary parameters only, and this weight is gathered quantized; use True or False"
            )
        self.site.forget()
        self.made_for, self.operands, self._state_stats, self._recall = (sides, dtype), None, [], None
        if sides is not None:
            if sides.remembers:
                self._recall = bind_recall(sides.quantizer, sides.row, sides.col, None)
            shape, ranks, quantizer = self.site.shape, self.site.group.size(), sides.quantizer
            of = (tuple(shape), ranks, dtype, self.site.device)
            row = GatheredOperand("row", quantizer.side("row"), *of)
            col = None if made_at_use(quantizer) else GatheredOperand("col", quantizer.side("col"), *of)
            self.operands = GatheredOperands(sides, dtype, row, col)

    def whole(self) -> QuantizedTensor:
        """The whole weight, over these tensors."""
        assert self.operands is not None
        sides, dtype, row, col = self.operands
        of_col = None if col is None else col.operand
        whole = QuantizedTensor(row.operand, of_col, sides.quantizer, self.site.shape, dtype)
        whole.title = f"the weight of {self.layer.title}"
        return whole

    def missing(self) -> list[Tensor]:
        """The freed buffers of a weight that also has filled ones: the buffers of the operand that is not wanted
        now."""
        large = self.operands.large if self.operands is not None else []
        freed = [t for t in large if not t.untyped_storage().size()]
        return freed if len(freed) < len(large) else []


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def copy_pairs(pairs: Copies) -> None:
    """Copy each second tensor over the first one, in few launches."""
    if pairs:
        copy_each([to for to, _ in pairs], [of for _, of in pairs])
