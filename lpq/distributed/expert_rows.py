"""Rows on their way to the ranks of their experts, and the results on their way back.

Rows lie expert by expert, and so do arriving rows: for each expert, rank by rank. Where rows travel encoded, each is
encoded before it is sent, into the bytes that it would get where it arrives. That takes a format in which no value
belongs to two rows (``why_not_row_by_row``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpq.formats import Quantizer
from lpq.formats.groups import why_not_row_by_row
from lpq.formats.layout import row_major
from lpq.operations.offsets import as_offsets
from lpq.operations.operands import encode_operands
from lpq.tensor import QuantizedTensor
from lpq.torch_private.collectives import all_to_all

WRONG = -1
"""The number of rows that a rank sends in place of each of its numbers if they make no sense."""
Dispatch = Literal["high_precision", "encoded"]
"""How rows travel to their experts."""


class Sent(NamedTuple):
    """Where the rows of one call went, and where the results belong."""

    order: Tensor
    """For each place in the order expert by expert, the row that stands there: its number among those that arrived."""
    back: Tensor
    """The inverse of ``order``."""
    sent: list[int]
    """How many rows went to each rank."""
    received: list[int]
    """How many rows came from each rank."""
    rows: int
    """How many rows the caller gave, those behind the last expert's included."""
    group: str


def dispatch(
    title: str, rows: Tensor, ends: Tensor | Sequence[int], experts: int, mesh: DeviceMesh, quantizer: Quantizer | None
) -> tuple[Tensor, Tensor, Sent]:
    """Send rows to the ranks of their experts. Return the rows of all ranks for the experts of this one, where each
    expert's end, and an argument for ``combine``.

    With a quantizer they travel as its row operand, and the tensor that is returned has that operand alone. The host
    waits for the numbers of rows. Where a rank's ends make no sense all ranks raise.
    """
    ranks, group = mesh.size(), mesh.get_group().group_name
    counts, mistake = _counts(title, rows, ends, experts)
    each = [experts // ranks] * ranks
    arriving = all_to_all(counts, each, each, group).view(ranks, -1)
    counts = counts.view(ranks, -1)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    if mistake is not None:
        raise mistake
    if any(count < 0 for count in received):
        raise ValueError(_blame(title, received, ends if min(sent) < 0 else None, len(rows)))
    expert = torch.arange(counts.shape[1], device=rows.device).repeat(ranks).repeat_interleave(arriving.view(-1))
    order = expert.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    call = Sent(order, back, sent, received, len(rows), group)
    arrived: Tensor = _exchange(rows[: sum(sent)], call, quantizer, True)
    return arrived, arriving.sum(0).cumsum(0, dtype=torch.int32), call


def _counts(title: str, rows: Tensor, ends: Tensor | Sequence[int], experts: int) -> tuple[Tensor, Exception | None]:
    """How many rows each expert gets. Where ``ends`` makes no sense these are negative, and the error is returned if
    it is found without waiting for the device: the other ranks wait for these numbers, and raise, too."""
    try:
        if rows.dim() != 2:
            raise ValueError(f"{title}: the input is {list(rows.shape)}, and must be [rows, features]: flatten it")
        known = as_offsets(title, ends, experts, rows).to(torch.int64)
    except (TypeError, ValueError) as error:
        return torch.full((experts,), WRONG, device=rows.device), error
    counts = known.diff(prepend=known.new_zeros(1))
    fits = (counts >= 0).all() & (known[-1] <= len(rows))
    return torch.where(fits, counts, WRONG), None


def _blame(title: str, received: Sequence[int], ends: Tensor | Sequence[int] | None, rows: int) -> str:
    """The words for ends that make no sense: ``ends``, if they are of this rank."""
    wrong = ", ".join(str(rank) for rank, count in enumerate(received) if count < 0)
    own = "" if ends is None else f" Here offs is {[*map(int, ends)]}, and there are {rows} rows."
    return (
        f"{title}: on rank {wrong} of its mesh offs does not grow from 0, ends behind the last row, or is not where "
        f"the rows of each expert end.{own} Pass counts.cumsum(0, dtype=torch.int32)"
    )


def combine(output: Tensor, call: Sent, dispatched: Dispatch) -> Tensor:
    """Send results back. Return those of this rank's own rows, in their order; zero where a row went to no expert.
    Gradients of the results travel encoded, if rows do, where a layer made the results and can multiply such gradients.
    """
    made_by = output.grad_fn if dispatched == "encoded" else None
    y: Tensor = _exchange(output, call, getattr(made_by, "encoded_gradient", None), False)
    behind = call.rows - len(y)
    return torch.cat([y, y.new_zeros(behind, *y.shape[1:])]) if behind else y


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, or results back to the ranks of the rows. Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: Sent, quantizer: Quantizer | None, to_experts: bool) -> Tensor:
        """``quantizer``: of what goes to experts, rows or the gradients of results."""
        ctx.call, ctx.quantizer, ctx.to_experts = call, quantizer, to_experts
        return _arrived(rows, call, quantizer) if to_experts else _returned(rows, call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = _returned(gradient, ctx.call) if ctx.to_experts else _arrived(gradient, ctx.call, ctx.quantizer)
        return back, None, None, None


_exchange: Any = _Exchange.apply


def _returned(rows: Tensor, call: Sent) -> Tensor:
    return all_to_all(rows[call.back], call.sent, call.received, call.group)


def _arrived(rows: Tensor, call: Sent, quantizer: Quantizer | None) -> Tensor:
    if quantizer is None:
        return all_to_all(rows, call.received, call.sent, call.group)[call.order]
    operand = encode_operands(quantizer, rows, row=True, col=False).row
    assert operand is not None
    tensors = [row_major(t) for t in operand.tensors()]
    came = all_to_all(torch.cat([*map(_bytes, tensors)], 1), call.received, call.sent, call.group)[call.order]
    shape = len(came), rows.shape[1]
    side = operand.quantizer
    row = side.storage.wrap([*_pieces(came, tensors)], side, shape, rows.dtype)
    return QuantizedTensor(row, None, quantizer, shape, rows.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a buffer, a line for each row."""
    return tensor.reshape(tensor.shape[0], prod(tensor.shape[1:])).view(torch.uint8)


def _pieces(came: Tensor, sent: Sequence[Tensor]) -> Iterator[Tensor]:
    """The buffers of lines of bytes in which they lie beside each other."""
    sizes = [prod(t.shape[1:]) * t.itemsize for t in sent]
    for piece, tensor in zip(torch.split(came, sizes, 1), sent, strict=True):
        yield piece.contiguous().view(tensor.dtype).view(len(came), *tensor.shape[1:])


# ---------------------------------------------------------------------------------------------- what may travel so


def encoded_rows(title: str, module: nn.Module) -> Quantizer:
    """The quantizer of the rows that are dispatched to a module of experts; an error where they cannot be encoded."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "dispatched")]
    recipes = {layer.recipe for layer in layers}
    if len(recipes) != 1 or None in recipes:
        names = sorted(str(recipe and recipe.title) for recipe in recipes)
        raise ValueError(
            f"{title} has layers with the recipes {names}, and rows that are dispatched encoded have one: give its "
            "layers one recipe, or dispatch='high_precision'"
        )
    quantizer: Quantizer = recipes.pop().x
    reason = why_not_row_by_row(quantizer)
    if reason is not None:
        raise ValueError(
            f"{title}: rows cannot be dispatched encoded as x={quantizer}: {reason}. Use dispatch='high_precision', or "
            "a recipe whose x is encoded row by row, and whose column operand is made of that (col_source=row)"
        )
    return quantizer


def own_experts(title: str, parameter: Any) -> Tensor:
    """The experts of this rank, of a parameter that ranks share out."""
    if parameter.device_mesh.ndim != 1:
        raise RuntimeError(
            f"{title}: its weight lies over {parameter.device_mesh} and was not gathered; call the module that "
            "fully_shard was called on, whose forward gathers it"
        )
    part: Tensor = parameter.to_local()
    return part


def own_numbers(parameter: Any) -> slice:
    """The numbers of these experts among all. FSDP2 puts its own dimension of the mesh before theirs."""
    mesh = parameter.device_mesh
    each = parameter.shape[0] // mesh.size(mesh.ndim - 1)
    first = mesh.get_local_rank(mesh.ndim - 1) * each
    return slice(first, first + each)
