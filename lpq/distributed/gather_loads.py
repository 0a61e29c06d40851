"""The loads of a unit: which weights send together, and how whole weights are made of the tensors that arrive.

All weights whose operands travel are one load. A weight that travels in high precision is a load of its own, and so is
each weight where FSDP2 wants tensors from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lpq.distributed.gather_arrivals import Arrivals
from lpq.distributed.gather_encoder import Buffers, Encoders, GatherPlan, ShardsEncoder, Task
from lpq.distributed.gathered_operand import sent_bytes
from lpq.distributed.shard import WeightShard, plain
from lpq.distributed.weight_gather import Copies, Gather, GatheredOperands, Load, copy_pairs
from lpq.formats.layout import as_bytes
from lpq.formats.sections import is_stack
from lpq.operations.binding import on_device
from lpq.operations.derived_operands import Derived, bind_derive_into
from lpq.operations.operators import can_bypass_dispatcher
from lpq.tensor import QuantizedTensor
from lpq.torch_private import cuda, fsdp
from lpq.torch_private.operators import copy_each


class Ordinary(Load):
    """A weight that is not quantized: FSDP2 gathers it as any parameter. The whole weight is what arrives."""

    def __init__(self, gather: Gather, dtype: torch.dtype) -> None:
        super().__init__((gather,))
        self._dtype = dtype

    def begin(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_high(self.gathers[0], self._dtype),)


class _Quantized(Load):
    """Weights with operands that are derived from other operands, once these have arrived."""

    def __init__(self, gathers: Sequence[Gather], plans: Sequence[GatherPlan]) -> None:
        super().__init__(gathers)
        self._device = gathers[0].site.device
        self._derived: list[Tensor] = []
        self._unwanted: list[Tensor] = []
        """The buffers of operands from which other operands were derived."""
        self._all: list[Tensor] = []
        columns: list[Derived] = []
        for gather, plan in zip(gathers, plans, strict=True):
            (sides, _, row, col), large = operands_of(gather), operands_of(gather).large
            self._all += large
            if col is not None and plan.col and not plan.sends_col:
                self._derived += col.large
                columns.append(Derived(sides.quantizer, row.operand, col.targets))
            if plan.sends_row and not plan.row:
                self._unwanted += row.large
        with on_device(self._device):
            self._derive = bind_derive_into(columns, self._device)

    def _complete(self) -> None:
        """Derive the operands that follow from the arrived ones. The device is the current one."""
        fsdp.allocate(self._derived)
        for derive in self._derive:
            derive()
        fsdp.free(self._unwanted)


class High(_Quantized):
    """A weight that travels in high precision (``GatherPlan.high``). It is encoded where it arrives, with the
    statistics that its shards have, and so into the same bytes."""

    def __init__(self, gather: Gather, shard: Tensor, plan: GatherPlan) -> None:
        super().__init__((gather,), (plan,))
        sides, dtype, row, col = operands_of(gather)
        self._gather, self._dtype, self._shape = gather, dtype, tuple(gather.site.shape)
        flags = tuple(s is not None for s in gather.statistics())
        self._encode = ShardsEncoder([Task(sides, plan, self._shape, dtype, dtype, self._device, flags)])
        self._wholes = [
            whole for whole, sends in ((row, plan.sends_row), (col, plan.sends_col)) if whole is not None and sends
        ]
        count = shard.numel() * gather.site.group.size() * dtype.itemsize
        self._arrives = torch.empty(count, dtype=torch.uint8, device=self._device)
        self.into = [self._arrives]
        self._stats: list[Tensor | None] = []
        fsdp.free(self.into)

    def begin(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.to_free.clear()
        self._stats = self._gather.statistics()
        return (as_bytes(_high(self._gather, self._dtype)),)

    def finish(self) -> None:
        stats, self._stats = self._stats, []
        _read_on_this_stream([s for s in stats if s is not None])
        with torch.no_grad():
            (operands,) = self._encode([self._arrives.view(self._dtype).view(self._shape)], [stats])
        for whole in self._wholes:
            fsdp.allocate(whole.large)
        copy_each([t for whole in self._wholes for t in whole.targets], [t for buffers in operands for t in buffers])
        with on_device(self._device):
            self._complete()
        self.to_free += self._all
        fsdp.free((self._arrives,))


class EncodedLoad(_Quantized):
    """Weights whose operands travel: they are encoded from shards in high precision, or stored. On one rank there is
    nobody to send to."""

    def __init__(
        self, gathers: Sequence[Gather], shards: Sequence[Tensor], plans: Sequence[GatherPlan],
        encoders: Encoders | None,
    ) -> None:  # fmt: skip
        """``encoders``: the unit's encoders; None where nothing is sent, and operands stay until they are read."""
        super().__init__(gathers, plans)
        self._plans = plans
        numbers = range(len(gathers))
        self._stored = [i for i in numbers if isinstance(shards[i], QuantizedTensor)]
        self._coded = [i for i in numbers if i not in self._stored]
        self._matrices = [_matrices(gather, shard) for gather, shard in zip(gathers, shards, strict=True)]
        tasks = [self._task(i, shards[i]) for i in self._coded]
        encode = self._encode = ShardsEncoder(tasks, encoders, gathers[0].model.scratch)
        self._together = encode.all if not self._stored else []
        """The encoders of all weights, for each operand, if one launch each encodes them."""
        self._remember = [(n, i) for n, i in enumerate(self._coded) if operands_of(gathers[i]).sides.remembers]
        """Weights with statistics of earlier steps, by their number among the encoded weights and among all."""
        self._moves = any(shards[i].device != self._device for i in self._coded)
        operands = [
            (i, side, whole)
            for side in (0, 1)
            for i, (gather, plan) in enumerate(zip(gathers, plans, strict=True))
            if (plan.sends_row, plan.sends_col)[side] and (whole := operands_of(gather)[2:][side]) is not None
        ]
        self._sends = [(i, side, number, whole) for i, side, whole in operands for number in whole.travels]
        """The buffers that travel: by the number of the weight, 0 for the row operand or 1, and the buffer's number."""
        self._stays = [(i, side, number) for i, side, whole in operands for number in whole.stays]
        """Buffers that are equal on all ranks."""
        self._staying: list[Tensor] = []
        self._sizes = [size for operands in self._together for size in operands.sizes] or None
        ranks = gathers[0].site.group.size()
        self._arrivals = Arrivals([whole for *_, whole in operands], ranks, self._device, self._sizes)
        self.into = self._arrivals.into
        self._anew = True
        """Whether what stays was allocated for the present gather."""
        self._streams: set[int] = set()
        """The streams on which the buffers that stay were read at their fixed addresses."""

    def _task(self, i: int, shard: Tensor) -> Task:
        gather = self.gathers[i]
        sides, dtype, *_ = operands_of(gather)
        x, flags = gather.prepared(shard), tuple(s is not None for s in gather.statistics())
        return Task(sides, self._plans[i], tuple(x.shape), x.dtype, dtype, x.device, flags)

    def begin(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.to_free.clear()
        gathers, coded = self.gathers, self._coded
        stats = [gathers[i].spanning for i in coded]
        copies: Copies = []
        for_backward = bool(self._remember) and gathers[0].site.for_backward
        for n, i in self._remember:
            stats[n] = gathers[i].statistics(self._matrices[i], copies, for_backward)
        if copies:
            copy_pairs(copies)
        xs = [cast("WeightShard", shards[i]).held for i in coded]
        if self._together and can_bypass_dispatcher(xs[0]):
            versions = [gathers[i].version for i in coded]
            stays: list[Tensor] = []
            flat: list[Tensor] = []
            spread: list[Tensor] = []
            with on_device(self._device):
                for encoder in self._together:
                    operand = encoder.encode(xs, stats, versions)
                    stays += operand.staying
                    spread += operand.spread
                    flat.append(operand.flat)
            self._staying, self._anew = stays, False
            if self._arrivals.flat:
                return (flat[0] if len(flat) == 1 else torch.cat(flat),)
            return tuple(spread)
        if self._moves:
            xs = [gathers[i].prepared(x) for i, x in zip(coded, xs, strict=True)]
        results: list[tuple[Buffers, Buffers]] = [((), ())] * len(gathers)
        with torch.no_grad():
            for i, operands in zip(coded, self._encode(xs, stats), strict=True):
                results[i] = operands
            for i in self._stored:
                results[i] = self._operands_of(i, shards[i])
            self._anew = True
            self._staying = [results[i][side][number] for i, side, number in self._stays]
            pieces = sent_bytes((whole, results[i][side][number]) for i, side, number, whole in self._sends)
            if self._sizes is not None and self._arrivals.flat:
                pieces = [nn.functional.pad(t, (0, n - len(t))) for t, n in zip(pieces, self._sizes, strict=True)]
            if self._arrivals.flat:
                return (torch.cat(pieces),)
        return tuple(pieces) or (torch.empty(0, dtype=torch.uint8, device=self._device),)

    def _operands_of(self, i: int, shard: Tensor) -> tuple[Buffers, Buffers]:
        """The buffers of a shard that is stored quantized."""
        assert isinstance(shard, QuantizedTensor)
        plan, dtype = self._plans[i], operands_of(self.gathers[i]).dtype
        row = shard.operand("row").astype(dtype).tensors() if plan.sends_row else ()
        return row, shard.operand("col").astype(dtype).tensors() if plan.sends_col else ()

    def finish(self) -> None:
        staying, self._staying = self._staying, []
        if self._device.type == "cuda":
            self._keep(staying)
        with on_device(self._device):
            self._arrivals.place(staying)
            if self._derive:
                self._complete()
        self.to_free += self._all

    def _keep(self, staying: Sequence[Tensor]) -> None:
        """Keep the memory of what stays until the present stream has read it."""
        if not self._anew:
            stream = cuda.current_stream(self._device.index)
            if stream in self._streams:
                return
            self._streams.add(stream)
        _read_on_this_stream(staying)


def operands_of(gather: Gather) -> GatheredOperands:
    """The operands that are filled of a weight which is gathered quantized."""
    assert gather.operands is not None
    return gather.operands


def _matrices(gather: Gather, shard: Tensor) -> slice | None:
    """The matrices of a stack that a shard has; None where the weight is a matrix."""
    count, rank = shard.shape[0], gather.site.group.rank()
    return slice(rank * count, (rank + 1) * count) if is_stack(gather.layer.weight.shape) else None


def _high(gather: Gather, dtype: torch.dtype) -> Tensor:
    """This rank's shard in high precision, with padding."""
    return plain(gather.site.padded).to(gather.site.device, dtype, non_blocking=True)


def _read_on_this_stream(tensors: Sequence[Tensor]) -> None:
    """Keep the memory of tensors, which were allocated on FSDP2's stream, until the present stream has read them."""
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    stream = torch.cuda.current_stream(on_gpu[0].device) if on_gpu else None  # which takes the host 10 µs
    for tensor in on_gpu:
        tensor.record_stream(stream)  # type: ignore[arg-type]
