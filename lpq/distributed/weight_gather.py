"""The gather of one weight in its quantized form: forward gathers the row operand, backward the column operand.

The whole weight is a ``QuantizedTensor`` whose buffers stay the same tensors; their memory is filled by a gather and
freed when FSDP2 shards the weight again. A layer saves the column operand in forward, where it is empty, and finds it
filled in backward. An operand that follows from the other one never travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.gather_encoder import Buffers, Encode, Sides, Way, sides_of, way_of
from lpq.distributed.gathered_operand import Whole
from lpq.distributed.shard import WeightShard, plain
from lpq.distributed.shard_groups import attach
from lpq.distributed.shardability import why_not, why_uncut
from lpq.formats import Quantizer
from lpq.formats.layout import as_bytes
from lpq.formats.stacks import is_stack
from lpq.kernels.table import kernels_allowed
from lpq.operations.measuring import measure
from lpq.operations.operands import recall
from lpq.operations.reduce_statistics import Reductions, spans
from lpq.tensor import QuantizedTensor
from lpq.torch_private import fsdp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layer(Protocol):
    """A layer, as far as the gather of its weight reads it."""

    weight: Tensor
    gather: Gather | None

    @property
    def title(self) -> str:
        """The name of the layer in messages."""

    def weight_quantizer(self) -> Quantizer | None:
        """The quantizer of the weight at this step; None: it stays in high precision."""

    def weight_state(self) -> Mapping[str, Tensor] | None:
        """The statistics of the weight that the quantizer remembers across steps."""

    def memories(self) -> dict[str, Tensor]:
        """All statistics that the layer's quantizers remember across steps."""


class Model(Protocol):
    """The model of a weight, as far as a gather reads it."""

    def check(self, gather: Gather) -> None:
        """Raise, before this gather, unless all ranks have the same model; a collective, where that is in doubt."""

    def refresh(self) -> None:
        """Measure every weight of it that was written to; a collective."""


class Measured(NamedTuple):
    """The last measurement: its tensor, the version of that, and the quantizer."""

    local: weakref.ref[Tensor]
    version: int
    quantizer: Quantizer | None


class Gather:
    """How one weight is gathered. FSDP2 calls ``begin`` before a gather and ``finish`` after it."""

    def __init__(self, layer: Layer, site: fsdp.Site, model: Model, checkpointed: bool) -> None:
        self.layer, self.site = layer, site
        self.stats: list[Tensor | None] = []
        """Statistics of the whole weight that reach beyond a shard or are remembered, in the order of ``declared``."""
        self.runs_again = checkpointed
        """Whether forward runs again in backward, which then needs the row operand too."""
        self._checkpointed = checkpointed
        self._model = model
        self._judged: tuple[Quantizer | None, Sides | None] = (None, None)
        """The last quantizer that the layer wanted, and ``sides`` for it."""
        self._measured: Measured | None = None
        self._spanning: list[Tensor | None] = []
        """Those of ``stats`` that reach beyond a shard; None in place of others."""
        self._whole: tuple[Sides, Whole, Whole] | None = None
        self._made_for: tuple[Sides | None, torch.dtype] | None = None
        self._ways: dict[tuple[object, ...], Way] = {}
        """The ways in which it is gathered, by all that they depend on."""
        self._way: Way
        """That of the present gather."""
        self._known: list[Tensor | None] = []
        """The statistics of earlier steps that forward recalled."""
        self._local: tuple[Buffers, Buffers] = ((), ())
        self._high: list[Tensor] = []
        """The memory in which a weight in high precision arrives, while it travels."""
        self._use: list[Tensor | None] = []
        """The statistics with which to encode a weight that arrives in high precision."""
        self._filled: list[Tensor] = []
        """The tensors that FSDP2 frees beside those that it gathered into: it holds this very list."""

    def note(self, runs_again: bool) -> None:
        """Note, as forward begins, whether it will run again in backward."""
        self.runs_again = runs_again or self._checkpointed

    def attached(self) -> ProcessGroup:
        """The group that shards the weight. It is attached to this rank's shard, if that is stored quantized."""
        attach(self.site.param)
        return self.site.group

    # ------------------------------------------------------------------------------ the quantizer and the statistics

    @property
    def sides(self) -> Sides | None:
        """The operands of the gathered weight; None: it is gathered in high precision."""
        wanted = self.layer.weight_quantizer()
        if wanted is not self._judged[0]:
            quantized = wanted is not None and self.why_whole(wanted) is None
            self._judged = wanted, sides_of(wanted, is_stack(self.layer.weight.shape)) if quantized else None
        return self._judged[1]

    def why_whole(self, quantizer: Quantizer) -> str | None:
        """Why the weight cannot be gathered quantized; None if it can."""
        shape = self.layer.weight.shape
        return self.site.refusal or why_not(quantizer, shape[0], self.site.group.size(), is_stack(shape))

    @property
    def stale(self) -> bool:
        """Whether the shard was written to, or its quantizer changed, since it was measured."""
        measured, local, wanted = self._measured, self.site.local, self.layer.weight_quantizer()
        return (
            measured is None
            or measured.local() is not local
            or (isinstance(local, WeightShard) and measured.version != local.write_count)
            or (measured.quantizer is not wanted and measured.quantizer != wanted)
        )

    def measure(self, reductions: Reductions) -> None:
        """Measure this rank's shard into ``stats``. These reductions make them the statistics of the whole weight."""
        local, sides = self.site.local, self.sides
        version = local.write_count if isinstance(local, WeightShard) else 0
        measured = Measured(weakref.ref(local), version, self._judged[0])

        def reduced() -> None:
            self._measured = measured

        self._measured = None  # until then each rank has others
        self.stats = self._spanning = []
        if sides is not None and isinstance(local, WeightShard):
            self.stats = self._spanning = [None] * len(sides.stats)
            if sides.measured:
                with torch.no_grad():
                    found = measure(self._prepared(local), sides.row, sides.col, dtype=self.site.dtype)
                if not is_stack(local.shape):  # of which no statistic is of several shards
                    reductions.add_stats(sides.stats, found, self.site.group, 1)
                self.stats = [*found]
                self._spanning = [s if spans(d) else None for s, d in zip(found, sides.stats, strict=True)]
        reductions.afterwards(reduced)

    def _prepared(self, shard: Tensor) -> Tensor:
        """The shard, on the device where it is encoded. FSDP2 would gather an ordinary parameter in ``site.dtype``, so
        the shard's values are rounded to that: here if they move to another device, else by the kernels that read
        them."""
        x = plain(shard)
        return x if x.device == self.site.device else x.to(self.site.device, self.site.dtype, non_blocking=True)

    def missing(self) -> list[Tensor]:
        """The freed buffers of a weight that has filled ones, too: those of the operand that is not wanted now."""
        large = [t for whole in self._whole[1:] for t in whole.large] if self._whole is not None else []
        freed = [t for t in large if not t.untyped_storage().size()]
        return freed if len(freed) < len(large) else []

    # ------------------------------------------------------------------------------ before a gather

    def begin(self, shard: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Encode the shard, and return the tensors that FSDP2 is to gather."""
        self._model.check(self)
        if isinstance(shard, QuantizedTensor):
            attach(self.site.param)
            sides: Sides | None = sides_of(self._stored_quantizer(shard), is_stack(shard.shape))
        else:
            if self.stale:
                self._model.refresh()
            sides = self.sides
        self._filled.clear()
        self._high = []
        if self._made_for != (sides, dtype):
            self._make(sides, dtype)
        if self._whole is None:
            return (plain(self.site.padded).to(self.site.device, dtype, non_blocking=True),)
        _, row, col = self._whole
        way = self._way = self._find_way(shard, dtype)
        if way.encode is None:
            of_row, of_col = self._local = _stored(shard, way, dtype)
        elif way.high:
            return self._begin_high(dtype)
        else:
            with torch.no_grad():
                of_row, of_col = self._local = way.encode(self._prepared(shard), self._statistics(way.matrices))
        if row.ranks == 1:  # there is nobody to send to, and FSDP2 takes one tensor only
            self.site.gather_into([_nothing(self.site.device)])
            return (_nothing(self.site.device),)
        sent: list[Tensor] = []
        into: list[Tensor] = []
        for sends, whole, buffers in ((way.sends_row, row, of_row), (way.sends_col, col, of_col)):
            if sends:
                sent += whole.departing(buffers)
                into += whole.arrived
        self.site.gather_into(into)
        return tuple(sent)

    def _make(self, sides: Sides | None, dtype: torch.dtype) -> None:
        """Make the tensors that the gather fills, once for each quantizer."""
        if self.site.reshards_to_fewer_ranks:
            raise ValueError(
                "fully_shard(reshard_after_forward=…) with a number of ranks: FSDP2 supports that for ordinary "
                "parameters only, and these are gathered quantized; use True or False"
            )
        self.site.forget()
        self._made_for, self._whole, self._known, self._ways = (sides, dtype), None, [], {}
        if sides is not None:
            shape, ranks, quantizer = self.layer.weight.shape, self.site.group.size(), sides.quantizer
            of = (tuple(shape), ranks, dtype, self.site.device)
            row, col = Whole("row", quantizer.side("row"), *of), Whole("col", quantizer.side("col"), *of)
            self._whole = sides, row, col

    def _find_way(self, shard: Tensor, dtype: torch.dtype) -> Way:
        """The way of the gather that is beginning; the first of its kind is bound."""
        key = (*self.site.directions(self.runs_again), type(shard), shard.dtype, kernels_allowed(), registry.epoch())
        way = self._ways.get(key)
        if way is None:
            assert self._whole is not None
            x, given = shard, [False]
            if isinstance(shard, WeightShard):
                x, given = self._prepared(shard), [s is not None for s in self._statistics()]
            shape, group = tuple(self.layer.weight.shape), self.site.group
            way = self._ways[key] = way_of(self._whole[0], key[:2], shape, group, x, dtype, given)
        return way

    def _begin_high(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Have the weight gathered in high precision, to be encoded where it arrives: with the statistics for its
        shards, and so into the same bytes."""
        self._use = self._statistics()
        shard = plain(self.site.padded).to(self.site.device, dtype, non_blocking=True)
        self._high = [torch.empty(shard.nbytes * self.site.group.size(), dtype=torch.uint8, device=shard.device)]
        fsdp.free(self._high)
        self.site.gather_into(self._high)
        return (as_bytes(shard),)

    def _encoded_high(self, encode: Encode, dtype: torch.dtype) -> tuple[Buffers, Buffers]:
        """The operands of a whole weight that arrived in high precision."""
        for stat in self._use:
            if stat is not None and stat.is_cuda:  # it was made on the stream on which FSDP2 gathers
                stat.record_stream(torch.cuda.current_stream(stat.device))
        with torch.no_grad():
            return encode(self._high[0].view(dtype).view(self.layer.weight.shape), self._use)

    def _statistics(self, matrices: slice | None = None) -> list[Tensor | None]:
        """The statistics to encode with: those that the layer remembers, else those that were measured of the whole
        weight; None where the statistic covers only values of the matrix that is encoded. Backward encodes with the
        statistics of forward, even if another backward changed the layer's state in between. ``matrices``: those of a
        stack that are encoded."""
        assert self._whole is not None
        sides = self._whole[0]
        state = self.layer.weight_state() if sides.remembers else None
        if not state:
            return self._spanning
        if not (self._known and self.site.for_backward):
            known = recall(sides.quantizer, sides.row, sides.col, state)
            self._known = [None if k is None else k.clone(memory_format=torch.contiguous_format) for k in known]
        known = [k if k is None or matrices is None else k[matrices] for k in self._known]
        return [s if k is None else k for k, s in zip(known, self._spanning, strict=True)]

    def _stored_quantizer(self, shard: QuantizedTensor) -> Quantizer:
        """The quantizer of a stored weight, which must be the recipe's."""
        wanted = self.layer.weight_quantizer()
        if wanted != shard.quantizer:
            raise ValueError(
                f"the weight of {self.layer.title} is stored as {shard.quantizer} and its recipe wants {wanted}: a "
                "weight that is stored quantized keeps its format; convert with weights='high_precision' to change it"
            )
        shape, ranks = self.layer.weight.shape, self.site.group.size()
        reason = self.site.refusal or why_uncut(shard.quantizer, shape[0], ranks, is_stack(shape))
        if reason is not None:
            raise ValueError(
                f"the weight of {self.layer.title} is stored as {shard.quantizer} and cannot be gathered so: {reason}; "
                "give lpq.convert(…, ranks=…) the number of ranks, or convert with weights='high_precision'"
            )
        return shard.quantizer

    # ------------------------------------------------------------------------------ after a gather

    def finish(self, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        """The whole weight, from the bytes that arrived. FSDP2 passes it as ``out`` at later gathers, to be filled."""
        if self._whole is None:
            return (outputs[0].reshape(-1), []) if out is None else None
        sides, row, col = self._whole
        way, (of_row, of_col), receive = self._way, self._local, Whole.receive
        self._local = (), ()
        if self._high:
            assert way.encode is not None
            of_row, of_col = self._encoded_high(way.encode, row.operand.dtype)
            receive = Whole.take
        if way.sends_row:
            receive(row, of_row)
        if way.sends_col:
            receive(col, of_col)
        elif way.col:
            col.derive(sides.quantizer, row)
        if not way.row:
            fsdp.free(row.large)
        if self._high:
            fsdp.free(self._high)
            self._high, self._use = [], []
        self._filled += [*row.large, *col.large]
        if out is not None:
            return None
        whole = QuantizedTensor(row.operand, col.operand, sides.quantizer, self.layer.weight.shape, row.operand.dtype)
        whole.place = f"the weight of {self.layer.title}"
        return whole, self._filled


def _stored(shard: Tensor, way: Way, dtype: torch.dtype) -> tuple[Buffers, Buffers]:
    """The buffers of the operands of a shard that is stored quantized."""
    assert isinstance(shard, QuantizedTensor)
    row = shard.operand("row").astype(dtype).tensors() if way.sends_row else ()
    return row, shard.operand("col").astype(dtype).tensors() if way.sends_col else ()


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)
