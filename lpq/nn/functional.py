"""Layers as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lpq import recipes, registry
from lpq.kernels.table import kernels_allowed
from lpq.nn.cached_weight import HeldWeight, turn_of, weight_operands
from lpq.nn.encoded_inputs import row_buffers
from lpq.nn.exported import forward_of
from lpq.nn.grouped_step import Groups
from lpq.nn.input_checks import on_two_devices, unfit_dtypes, why_not_followed
from lpq.nn.multiply import LayerCall, Multiplication
from lpq.nn.observing import Watch
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, bind_few
from lpq.nn.wanted import Accumulate
from lpq.operations import groups as in_groups
from lpq.operations.binding import on_device
from lpq.operations.inputs import DTYPES
from lpq.operations.offsets import as_offsets
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.random_seeds import draw_seeds, with_one_turn
from lpq.operations.states import State
from lpq.recipes import RecipeLike, recipe_sources
from lpq.recipes.gemms import TENSORS
from lpq.tensor import QuantizedTensor
from lpq.torch_private.compiling import is_exporting, once_when_traced


def grouped_linear(
    x: Tensor, w: Tensor, offs: Tensor | Sequence[int], recipe: RecipeLike, bias: Tensor | None = None
) -> Tensor:
    """Multiply each group of rows by a matrix of its own; see ``nn.GroupedLinear``.

    Args:
        x: The rows of all groups, ``[rows, K]``.
        w: The matrix of each group, ``[groups, N, K]``: an ordinary tensor, or a stack that is stored quantized.
        offs: Where each group ends, int32 on the device of ``x``, or a list of counts.
        recipe: The recipe of the operands. It must not remember statistics across steps.
        bias: ``[groups, N]``, or None.
    """
    title = "grouped_linear"
    if not isinstance(w, Tensor) or w.dim() != 3:
        what = list(w.shape) if isinstance(w, Tensor) else type(w).__name__
        raise ValueError(f"{title}: w is {what}, and must be [groups, N, K]")
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"{title}: bias is a {type(bias).__name__}: pass a tensor [groups, N], or None")
    check_tensors(title, x, w, bias)
    plan = _plan(recipe)
    if plan.memories:
        raise ValueError(f"{title}: {recipe} remembers statistics across steps, and a function has no state")
    ends = as_offsets(title, offs, w.shape[0], x)
    return grouped_linear_of(title, plan, x, w, bias, ends)


@once_when_traced
def _plan(recipe: RecipeLike) -> Plan:
    return _plan_of(recipes.recipe(recipe))


_plan_of = registry.cached(Plan.of)


@once_when_traced
def high_precision() -> Plan:
    """The plan that multiplies tensors as they are."""
    return _plan_of(recipe_sources.high_precision())


def grouped_linear_of(
    title: str,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    *,
    held_weight: HeldWeight | None = None,
    accumulate: Accumulate | None = None,
    states: Mapping[str, State] | None = None,
    watch: Watch | None = None,
    calls: dict[object, Any] | None = None,
) -> Tensor:
    """Multiply checked tensors as ``grouped_linear`` does, by a plan. ``held_weight``: the weight, if it is held.
    ``states``: the static statistics of each tensor, with one for each group. ``watch``: the observers of the layer.
    ``calls``: the steps that the layer has bound for this plan; a look-up among the steps of all layers takes
    longer."""
    grad, dtype = torch.is_grad_enabled(), x.dtype
    buffers = row_buffers(title, plan, x) if isinstance(x, QuantizedTensor) else None
    seeds = None
    if plan.stochastic:
        drawn = draw_seeds(x if buffers is None else buffers[0], weight, weight.shape[0] * len(TENSORS))
        seeds = drawn.view(-1, len(TENSORS)).t().contiguous()  # by tensors, and drawn by groups
    needs_dx, needs_dw = grad and x.requires_grad, grad and weight.requires_grad
    device = x.device.type
    casts = not x.is_meta and torch.is_autocast_enabled(device)
    if casts:
        dtype = torch.get_autocast_dtype(device)
    operands, first = weight_operands(plan, weight, held_weight, needs_dx), x if buffers is None else buffers[0]
    if plan.turns and seeds is not None:
        seeds = with_one_turn(seeds, turn_of(plan.w, operands))
    (rows, features), (groups, outputs, _) = x.shape, weight.shape
    with torch.autocast(device, enabled=False) if casts else nullcontext(), on_device(x.device):
        watched = not can_bypass_dispatcher(first)
        exports = watched and is_exporting()
        multiply: Any = forward_of(Multiplication, title, weight) if exports else Multiplication.apply
        parts = Groups(groups, not watched and in_groups.at_once(first, offs))
        shapes = Shapes(
            rows, features, outputs, x.dtype, weight.dtype, dtype, weight.dtype, x.device, needs_dx, needs_dw,
            operands is not None, compiled=torch.compiler.is_dynamo_compiling(), taken=buffers is not None, parts=parts,
        )  # fmt: skip
        key = None if watched else (shapes, kernels_allowed())
        step = None if calls is None else calls.get(key)
        if step is None and not watched:
            step = bind_few(plan, shapes)
            if calls is not None:
                calls[key] = step
        own = states or {}, seeds, operands, (), accumulate
        rows_encoded = None if buffers is None else (buffers, ())
        call = LayerCall(plan, shapes, step, *own, input=rows_encoded, ends=(offs,), title=title, watch=watch)
        y: Tensor = multiply(x, weight, bias, call)
    return y


def why_not_in_groups(plan: Plan) -> str | None:
    """Why rows in groups are not multiplied so; None if they are."""
    if plan.moving:
        return (
            "it remembers statistics across steps, and no state is kept for each group of rows: use one that measures "
            "each tensor"
        )
    return None


def check_tensors(title: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that ``x`` is ``[rows, features]``, and that weight and bias go with it."""
    features = weight.shape[2]
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{title}: the input is a {type(x).__name__}: pass an ordinary tensor [rows, {features}]")
    if x.dim() != 2 or x.shape[1] != features:
        raise ValueError(
            f"{title}: the input is {list(x.shape)}, and must be [rows, {features}], group by group: flatten it"
        )
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise unfit_dtypes(title, x, weight)
    if (why := why_not_followed()) is not None:
        raise RuntimeError(f"{title}: {why}")
    if hasattr(weight, "device_mesh"):
        raise RuntimeError(
            f"{title}: its weight is sharded and was not gathered; call the module that fully_shard was called on, "
            "whose forward gathers it, or its unshard()"
        )
    if x.device != weight.device:
        raise on_two_devices(title, x, weight)
    if bias is None:
        return
    if bias.shape != weight.shape[:2] or bias.device != x.device or not bias.is_floating_point():
        raise ValueError(
            f"{title}: the bias is {bias.dtype}, {list(bias.shape)} on {bias.device}, and must be floating, "
            f"{list(weight.shape[:2])} on {x.device}"
        )
