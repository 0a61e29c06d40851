"""Rows on their way to the ranks of their experts, and the results on their way back.

Rows lie expert by expert, and so do arriving rows: for each expert, rank by rank. All that can fail on one rank, such
as to encode its rows, is done before the ranks exchange how many rows go to each expert: with these numbers each one
tells the others whether it has failed, and which model it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpq.distributed.alike import DIFFER, REMEDY, CachedDescription, agree
from lpq.distributed.ranks import Ranks, raise_on_all
from lpq.formats import Quantizer, Storage
from lpq.formats.layout import row_major
from lpq.formats.sections import why_not_row_by_row
from lpq.operations.offsets import as_offsets
from lpq.operations.operands import encode_operands
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.autograd import at_the_end_of_backward
from lpq.torch_private.collectives import all_to_all, arrived, begin_all_reduce
from lpq.torch_private.compiling import outside_graphs
from lpq.torch_private.distributed import group_named

WRONG = -1
"""The number of rows that a rank sends in place of each of its numbers if they make no sense."""
MODELS = 1 << 62
"""How many numbers stand for different models."""
Dispatch = Literal["high_precision", "encoded"]
"""How rows travel to their experts."""


class Route(NamedTuple):
    """Where the rows of one call went, and where the results belong."""

    order: Tensor
    """For each place in the order expert by expert, the number of its row in the order of arrival."""
    back: Tensor
    """The inverse of ``order``."""
    to_ranks: list[int]
    """How many rows went to each rank."""
    from_ranks: list[int]
    """How many rows came from each rank."""
    rows: int
    """How many rows the caller gave, those behind the last expert's included."""
    group: str
    title: str
    """The name of the module in messages."""


class Dispatched:
    """How rows come to a layer whose experts ranks share out."""

    def __init__(self, encoded: bool) -> None:
        self.encoded = encoded


class RowExchange(Dispatched):
    """Sends the rows of a call of a module to their experts, and the results back."""

    def __init__(self, module: nn.Module, encoded: bool) -> None:
        super().__init__(encoded)
        self.title, self.experts = type(module).__name__, next(module.parameters()).shape[0]
        self.sends = True
        """Whether this rank sends rows to any expert."""
        self._module, self._described = module, CachedDescription(module)
        self._met = False
        """Whether all ranks have come to a first call: until then one may be about to share out other experts."""
        self._call: Route | None = None
        """The call that has begun and not ended. One that activation checkpointing breaks off never ends."""

    @outside_graphs
    def dispatch(self, rows: Tensor, ends: Tensor | Sequence[int], mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """Send rows to the ranks of their experts. Return the rows of all ranks for the experts of this rank, and where
        the rows of each expert end. Where rows travel encoded, the returned tensor has the row operand alone. The host
        waits for the numbers of rows. Where a rank's ends make no sense, its rows cannot be encoded, or its module is
        another one, all ranks raise.
        """
        ranks, group, title = mesh.size(), mesh.get_group(), self.title
        counts, lines, mistake = self._prepare(rows, ends)
        number, text = self._described.with_rows(rows)
        if not self._met:
            agree(text.split("\n"), mesh)
            self._met = True
        number %= MODELS
        own = torch.cat([counts.view(ranks, -1), counts.new_full((ranks, 1), number)], 1)
        each = [own.shape[1]] * ranks
        numbers = all_to_all(own.view(-1), each, each, group.group_name).view(ranks, -1)
        counts, inbound = own[:, :-1], numbers[:, :-1]
        to_ranks, from_ranks, models = torch.stack([counts.sum(1), inbound.sum(1), numbers[:, -1]]).tolist()
        if min(from_ranks) < 0:  # on all ranks, as one sends such numbers to all
            if min(to_ranks) < 0 and mistake is None:
                mistake = ValueError(
                    f"{title}: offs does not grow from 0, ends behind the last row, or is not where the rows of each "
                    f"expert end. It is {[*map(int, ends)]}, and there are {len(rows)} rows: pass "
                    "counts.cumsum(0, dtype=torch.int32)"
                )
            raise_on_all(mistake, [Ranks(group)], f"{title}: ", " send its rows", ValueError)
        if {*models} != {number}:  # on all ranks, as each one gets the numbers of all
            Ranks(group).equal(text.split("\n"), DIFFER, REMEDY)
        expert = torch.arange(counts.shape[1], device=rows.device).repeat(ranks).repeat_interleave(inbound.reshape(-1))
        order = expert.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        self._call = call = Route(order, back, to_ranks, from_ranks, len(rows), group.group_name, title)
        return _exchange(rows, call, True, lines, None), inbound.sum(0).cumsum(0, dtype=torch.int32)

    def _prepare(self, rows: Tensor, ends: Tensor | Sequence[int]) -> tuple[Tensor, Lines | None, Exception | None]:
        """Count the rows of each expert, and encode those that travel encoded. On a mistake the numbers are negative,
        and the error is returned if it is found without waiting for the device: the other ranks wait for these
        numbers."""
        title, experts = self.title, self.experts
        try:
            if rows.dim() != 2:
                raise ValueError(f"{title}: the input is {list(rows.shape)}, and must be [rows, features]: flatten it")
            offsets = as_offsets(title, ends, experts, rows).to(torch.int64)
            if not self.sends:
                offsets = torch.zeros_like(offsets)
            quantizer, why_not = encoded_rows(self._module) if self.encoded else (None, "")
            if why_not:
                warn(f"{title}: rows are dispatched in high precision as long as they cannot be encoded: {why_not}")
            lines = None
            if quantizer is not None:
                lines = _lines(rows.detach(), quantizer, title)
            elif isinstance(rows, QuantizedTensor):
                raise ValueError(
                    f"{title}: its rows are encoded already, as {rows.quantizer}, and travel in high precision: pass "
                    "them before they are encoded, or share the experts out by ExpertParallel(dispatch='encoded')"
                )
        except Exception as error:
            return torch.full((experts,), WRONG, device=rows.device), None, error
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        fits = (counts >= 0).all() & (offsets[-1] <= len(rows))
        return torch.where(fits, counts, WRONG), lines, None

    @outside_graphs
    def combine(self, results: Tensor) -> Tensor:
        """Send results back. Return the results of this rank's own rows, in their order; zero where a row went to no
        expert. Gradients of the results travel encoded, if rows do, where a layer made the results and can multiply
        such gradients."""
        assert self._call is not None
        call, self._call = self._call, None
        quantizer = getattr(results.grad_fn, "encoded_gradient", None) if self.encoded else None
        if quantizer is not None and why_not_row_by_row(quantizer) is not None:
            quantizer = None
        y: Tensor = _exchange(results, call, False, None, quantizer)
        return y


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, or results back to the ranks of the rows. Gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, call: Route, to_experts: bool, lines: Lines | None, quantizer: Quantizer | None
    ) -> Tensor:
        """``lines``: rows that go to experts encoded; ``quantizer``: of the gradients of results, which go there."""
        ctx.call, ctx.to_experts, ctx.quantizer = call, to_experts, quantizer
        return _arrived(rows, call, lines) if to_experts else _returned(rows, call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.to_experts:
            return _returned(gradient, ctx.call), None, None, None, None
        if ctx.quantizer is None and isinstance(gradient, QuantizedTensor):
            raise TypeError(
                f"{ctx.call.title}: the gradient of its results, {list(gradient.shape)}, arrived encoded as "
                f"{gradient.quantizer}, and travels in high precision. Return the gradient as it was before, or "
                "gradient.dequantize(), from the backward that encoded it"
            )
        lines = None if ctx.quantizer is None else _lines_or_nothing(gradient, ctx.quantizer, ctx.call)
        return _arrived(gradient, ctx.call, lines), None, None, None, None


_exchange: Any = _Exchange.apply


def _returned(rows: Tensor, call: Route) -> Tensor:
    """Send each row back to its caller; return these, and zeros where a row went to no expert."""
    here = all_to_all(rows[call.back], call.to_ranks, call.from_ranks, call.group)
    behind = call.rows - len(here)
    return torch.cat([here, here.new_zeros(behind, *here.shape[1:])]) if behind else here


def _arrived(rows: Tensor, call: Route, lines: Lines | None) -> Tensor:
    """The rows of all ranks for the experts of this rank."""
    count = sum(call.to_ranks)
    if lines is None:
        return all_to_all(rows[:count], call.from_ranks, call.to_ranks, call.group)[call.order]
    lines_here = all_to_all(lines.bytes[:count], call.from_ranks, call.to_ranks, call.group)[call.order]
    shape, side = (len(lines_here), rows.shape[1]), lines.operand.quantizer
    row = side.storage.from_tensors([*_pieces(lines_here, lines.operand.tensors())], side, shape, rows.dtype)
    return QuantizedTensor(row, None, lines.quantizer, shape, rows.dtype)


class Lines(NamedTuple):
    """Rows that are encoded."""

    quantizer: Quantizer
    operand: Storage
    bytes: Tensor
    """One line for each row: the bytes of the row in all buffers, beside each other."""


def _lines(rows: Tensor, quantizer: Quantizer, title: str) -> Lines:
    """Encode rows; those that are encoded already stay as they are."""
    if isinstance(rows, QuantizedTensor):
        if rows.quantizer.side("row") != quantizer.side("row"):
            raise ValueError(
                f"{title}: rows, {list(rows.shape)}, are encoded already, as {rows.quantizer}, and its recipe encodes "
                f"them as {quantizer}: hand them on before they are encoded"
            )
        return _in_lines(quantizer, rows.operand("row"))
    operand = encode_operands(quantizer, rows, row=True, col=False).row
    assert operand is not None
    return _in_lines(quantizer, operand)


def _in_lines(quantizer: Quantizer, operand: Storage) -> Lines:
    buffers = [row_major(tensor) for tensor in operand.tensors()]
    lines = torch.cat([t.reshape(t.shape[0], prod(t.shape[1:])).view(torch.uint8) for t in buffers], 1)
    return Lines(quantizer, operand, lines)


def _lines_or_nothing(gradient: Tensor, quantizer: Quantizer, call: Route) -> Lines:
    """The lines of a gradient. Where a rank cannot encode it, lines of nothing travel, so that no rank waits for it,
    and at the end of backward, where the host would wait anyway, all ranks raise."""
    error: Exception | None = None
    try:
        lines = _lines(gradient, quantizer, call.title)
    except Exception as raised:
        error, side, (rows, features) = raised, quantizer.side("row"), gradient.shape
        empty = side.storage.empty(side, (rows, features), gradient.dtype, gradient.device)
        lines = _in_lines(quantizer, empty)
        lines.bytes.zero_()
    mine = torch.full((1,), int(error is not None), dtype=torch.int32, device=gradient.device)
    failed = begin_all_reduce(mine, "max", call.group)

    def check() -> None:
        if arrived([failed])[0].item():
            what = " encode the gradients of the results of experts"
            raise_on_all(error, [Ranks(group_named(call.group))], "", what)

    at_the_end_of_backward(check)
    return lines


def _pieces(lines: Tensor, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Take the buffers out of lines of bytes in which they lie beside each other. Each is copied to memory of its own:
    a piece of a single line is contiguous where it lies, and may begin at a byte at which no wider element can."""
    sizes = [prod(t.shape[1:]) * t.itemsize for t in buffers]
    for piece, tensor in zip(torch.split(lines, sizes, 1), buffers, strict=True):
        own = piece.clone(memory_format=torch.contiguous_format)
        yield own.view(tensor.dtype).view(len(lines), *tensor.shape[1:])


# ---------------------------------------------------------------------------------------------- what may travel so


def encoded_rows(module: nn.Module) -> tuple[Quantizer | None, str]:
    """The quantizer of the rows that are dispatched to a module of experts; None, and why, if none can be encoded."""
    recipes: set[Any] = {layer.recipe for layer in module.modules() if hasattr(type(layer), "dispatched")}
    if len(recipes) != 1 or None in recipes:
        names = sorted(str(recipe and recipe.title) for recipe in recipes)
        return None, f"it has layers with the recipes {names}, and rows that are dispatched encoded have one"
    quantizer: Quantizer = recipes.pop().x
    reason = why_not_row_by_row(quantizer)
    return (quantizer, "") if reason is None else (None, f"x={quantizer}: {reason}")


def own_experts(title: str, parameter: Any) -> Tensor:
    """The experts of this rank in a parameter that is divided over ranks."""
    if parameter.device_mesh.ndim != 1:
        raise RuntimeError(
            f"{title}: its weight lies over {parameter.device_mesh} and was not gathered; call the module that "
            "fully_shard was called on, whose forward gathers it"
        )
    part: Tensor = parameter.to_local()
    return part


def own_numbers(parameter: Any) -> slice:
    """The numbers of this rank's experts among all experts. FSDP2 puts its own dimension of the mesh before theirs."""
    mesh = parameter.device_mesh
    each = parameter.shape[0] // mesh.size(mesh.ndim - 1)
    first = mesh.get_local_rank(mesh.ndim - 1) * each
    return slice(first, first + each)
