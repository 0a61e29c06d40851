"""The gather of one weight in its quantized form: forward gathers the row operand, backward the column operand.

The whole weight is a ``QuantizedTensor`` whose buffers stay the same tensors; their memory is filled by a gather and
freed when FSDP2 shards the weight again. A layer saves the column operand in forward, where it is empty, and finds it
filled in backward. An operand that follows from the other one never travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lpq.distributed.gathered_operand import Whole
from lpq.distributed.shard import WeightShard, plain
from lpq.distributed.shard_groups import attach
from lpq.distributed.shardability import operand_bytes, why_not, why_uncut
from lpq.formats import Quantizer, Storage
from lpq.formats.layout import Stat, as_bytes
from lpq.formats.stacks import is_stack
from lpq.operations.derived_operands import derive_col, derives_col
from lpq.operations.measuring import measure
from lpq.operations.operands import moves, recall, recalls
from lpq.operations.quantizing import quantize
from lpq.operations.reduce_statistics import Reductions, spans
from lpq.operations.sides import declared
from lpq.tensor import QuantizedTensor
from lpq.torch_private import fsdp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layer(Protocol):
    """A layer, as far as the gather of its weight reads it."""

    weight: Tensor

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


class Sides(NamedTuple):
    """The quantizers of the operands that are encoded from the shard."""

    row: Quantizer
    col: Quantizer | None
    """None: the column operand follows from the row operand."""
    stats: list[tuple[Stat, int]]
    """The statistics that they need, in the order of ``declared``."""


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
        self._measured: Measured | None = None
        self._whole: tuple[Quantizer, Whole, Whole] | None = None
        self._made_for: tuple[Quantizer | None, torch.dtype] | None = None
        self._wanted = (False, False)
        self._known: list[Tensor | None] = []
        """The statistics of earlier steps that forward recalled."""
        self._local: tuple[Storage | None, Storage | None] = (None, None)
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
    def quantizer(self) -> Quantizer | None:
        """The quantizer of the gathered weight; None: it is gathered in high precision."""
        wanted = self.layer.weight_quantizer()
        return wanted if wanted is not None and self.why_whole(wanted) is None else None

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
        local = self.site.local
        version = local.write_count if isinstance(local, WeightShard) else 0
        measured = Measured(weakref.ref(local), version, self.layer.weight_quantizer())

        def reduced() -> None:
            self._measured = measured

        self._measured = None  # until then each rank has others
        self.stats = self._measure(local, reductions)
        reductions.afterwards(reduced)

    def _measure(self, local: Tensor, reductions: Reductions) -> list[Tensor | None]:
        quantizer = self.quantizer
        if quantizer is None or not isinstance(local, WeightShard):
            return []
        row, col, of = _sides(quantizer)
        needed = any(spans(d) and not known for d, known in zip(of, recalls(quantizer, row, col), strict=True))
        needed = needed and not is_stack(local.shape)  # of which no statistic is of several shards
        if not needed and not moves(quantizer, row, col):
            return [None] * len(of)
        with torch.no_grad():
            measured = measure(self._prepared(local), row, col, dtype=self.site.dtype)
        if not is_stack(local.shape):
            reductions.add_stats(of, measured, self.site.group, 1)
        return [*measured]

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
        if self.site.reshards_to_fewer_ranks:
            raise ValueError(
                "fully_shard(reshard_after_forward=…) with a number of ranks: FSDP2 supports that for ordinary "
                "parameters only, and these are gathered quantized; use True or False"
            )
        if isinstance(shard, QuantizedTensor):
            attach(self.site.param)
        elif self.stale:
            self._model.refresh()
        self._filled.clear()
        self._high = []
        quantizer = self._stored_quantizer(shard) if isinstance(shard, QuantizedTensor) else self.quantizer
        self._make(quantizer, dtype)
        if self._whole is None:
            return (plain(self.site.padded).to(self.site.device, dtype, non_blocking=True),)
        quantizer, row, col = self._whole
        self._wanted = self.site.directions(self.runs_again)
        if isinstance(shard, QuantizedTensor):
            self._local = self._stored(shard, quantizer)
        elif row.ranks > 1 and heavy(quantizer, tuple(self.layer.weight.shape[-2:]), dtype, *self._wanted):
            return self._begin_high(quantizer, dtype)
        else:
            with torch.no_grad():
                use = self._statistics(quantizer, self._matrices(shard))
                self._local = self._encoded(self._prepared(shard), quantizer, use)
        travels = [(w, s.astype(dtype)) for w, s in zip((row, col), self._local, strict=True) if s is not None]
        if row.ranks == 1:  # there is nobody to send to, and FSDP2 takes one tensor only
            self.site.gather_into([_nothing(self.site.device)])
            return (_nothing(self.site.device),)
        self.site.gather_into([t for whole, _ in travels for t in whole.arrived])
        return tuple(t for whole, storage in travels for t in whole.departing(storage))

    def _make(self, quantizer: Quantizer | None, dtype: torch.dtype) -> None:
        """Make the tensors that the gather fills, once for each quantizer."""
        if self._made_for == (quantizer, dtype):
            return
        self.site.forget()
        self._made_for, self._whole, self._known = (quantizer, dtype), None, []
        if quantizer is not None:
            shape, ranks = self.layer.weight.shape, self.site.group.size()
            of = (tuple(shape), ranks, dtype, self.site.device)
            self._whole = quantizer, Whole("row", quantizer.side("row"), *of), Whole("col", quantizer.side("col"), *of)

    def _begin_high(self, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Have the weight gathered in high precision, to be encoded where it arrives: with the statistics for its
        shards, and so into the same bytes."""
        self._use = self._statistics(quantizer)
        shard = plain(self.site.padded).to(self.site.device, dtype, non_blocking=True)
        self._high = [torch.empty(shard.nbytes * self.site.group.size(), dtype=torch.uint8, device=shard.device)]
        fsdp.free(self._high)
        self.site.gather_into(self._high)
        return (as_bytes(shard),)

    def _encoded_high(self, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Storage | None, Storage | None]:
        """The operands of a whole weight that arrived in high precision."""
        for stat in self._use:
            if stat is not None and stat.is_cuda:  # it was made on the stream on which FSDP2 gathers
                stat.record_stream(torch.cuda.current_stream(stat.device))
        with torch.no_grad():
            return self._encoded(self._high[0].view(dtype).view(self.layer.weight.shape), quantizer, self._use)

    def _encoded(
        self, x: Tensor, quantizer: Quantizer, use: list[Tensor | None]
    ) -> tuple[Storage | None, Storage | None]:
        """The wanted operands of a shard or of the whole, except one that follows from the other."""
        row_side, col_side, _ = _sides(quantizer)
        row = col = None
        if self._wanted[0] or col_side is None:
            row, _, _ = quantize(x, use[: len(row_side.stats)], row_side, None, dtype=self.site.dtype)
        if self._wanted[1] and col_side is not None:
            _, col, _ = quantize(x, use[len(row_side.stats) :], None, col_side, dtype=self.site.dtype)
        return row, col

    def _matrices(self, shard: Tensor) -> slice:
        """The matrices of a stack that a shard has. A layer may remember statistics of each."""
        count = shard.shape[0]
        first = self.site.group.rank() * count
        return slice(first, first + count) if is_stack(shard.shape) else slice(None)

    def _statistics(self, quantizer: Quantizer, matrices: slice = slice(None)) -> list[Tensor | None]:
        """The statistics to encode with: those that the layer remembers, else those that were measured of the whole
        weight; None where the statistic covers only values of the matrix that is encoded. Backward encodes with the
        statistics of forward, even if another backward changed the layer's state in between. ``matrices``: those of a
        stack that are encoded."""
        row, col, of = _sides(quantizer)
        known: list[Tensor | None] = [None] * len(of)
        if state := self.layer.weight_state():
            if not (self._known and self.site.for_backward):
                self._known = [None if k is None else k.clone() for k in recall(quantizer, row, col, state)]
            known = [k if k is None or matrices == slice(None) else k[matrices] for k in self._known]
        return [s if k is None and spans(d) else k for k, s, d in zip(known, self.stats, of, strict=True)]

    def _stored(self, shard: QuantizedTensor, quantizer: Quantizer) -> tuple[Storage | None, Storage | None]:
        """As ``_encoded``, for a shard that is stored quantized."""
        derived = derives_col(quantizer)
        row = shard.operand("row") if self._wanted[0] or derived else None
        return row, (shard.operand("col") if self._wanted[1] and not derived else None)

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
        quantizer, row, col = self._whole
        local_row, local_col = self._local
        self._local = None, None
        receive = Whole.receive
        if self._high:
            local_row, local_col = self._encoded_high(quantizer, row.operand.dtype)
            receive = Whole.take
        if local_row is not None:
            receive(row, local_row)
        if local_col is not None:
            receive(col, local_col)
        elif self._wanted[1]:
            col.take(derive_col(quantizer, row.operand))
        if not self._wanted[0]:
            fsdp.free(row.large)
        if self._high:
            fsdp.free(self._high)
            self._high, self._use = [], []
        self._filled += [*row.large, *col.large]
        if out is not None:
            return None
        whole = QuantizedTensor(row.operand, col.operand, quantizer, self.layer.weight.shape, row.operand.dtype)
        whole.place = f"the weight of {self.layer.title}"
        return whole, self._filled


@cache  # called before every gather
def heavy(quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype, row: bool, col: bool) -> bool:
    """Whether these operands have more bytes than the weight in high precision, which then travels instead."""
    return operand_bytes(quantizer, *shape, dtype, row, col) > prod(shape) * dtype.itemsize


@cache  # called before every gather
def _sides(quantizer: Quantizer) -> Sides:
    """The quantizers of the operands that are encoded from a shard, and the statistics that they need."""
    row, col = quantizer.side("row"), None if derives_col(quantizer) else quantizer.side("col")
    return Sides(row, col, declared(row, col))


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)
