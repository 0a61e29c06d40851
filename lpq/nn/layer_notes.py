"""Lines of a report about layers over ranks and about experts: which of their tensors travel, and how; how the products
of experts are computed, and from how many rows on they beat bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lpq.distributed.shardability import operand_bytes, why_high
from lpq.formats import Quantizer
from lpq.formats.sections import why_not_row_by_row
from lpq.nn.expert_stacks import expert_stacks
from lpq.nn.grouped_linear import GroupedLayer
from lpq.nn.linear import Layer
from lpq.operations.cut import Cut
from lpq.operations.group_choice import pays_from, why_decoded
from lpq.recipes import Recipe
from lpq.torch_private import symmetric

TOKENS = 2**14
"""Tokens of a sequence in a batch for which bytes are counted; more or fewer change them little."""


def parallel_notes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer that a style of ``lpq.distributed`` shards, with the style and the tensors that
    travel."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedLayer) and module.dispatched is not None:
            yield name, _of_experts(module)
        if isinstance(module, Layer) and module.layouts is not None:
            weight: Any = module.weight
            ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
            columns = weight.placements[-1].is_shard(0)
            yield name, f"{'outputs' if columns else 'inputs'} over {ranks} ranks{_gathers(module, columns, ranks)}"


def _of_experts(module: Any) -> str:
    """How experts are divided over ranks, and in which form rows travel to them."""
    weight: Any = next(module.parameters())
    count, ranks = weight.shape[0], weight.device_mesh.size(weight.device_mesh.ndim - 1)
    text = f"{count // ranks} of {count} experts on each of {ranks} ranks; rows are dispatched"
    if not module.dispatched.encoded or module.recipe is None or why_not_row_by_row(module.recipe.x) is not None:
        return f"{text} in high precision"
    of_x, of_dy = module.recipe.x, module.recipe.dy
    bias = any(name.rpartition(".")[2].endswith("bias") for name, _ in module.named_parameters())
    reason = "there is a bias, whose gradient is their sum" if bias else why_not_row_by_row(of_dy)
    text = f"{text} as {_share(of_x)}; gradients of results"
    return f"{text} in high precision: {reason}" if reason is not None else f"{text} likewise, as {_share(of_dy)}"


def _share(quantizer: Quantizer) -> str:
    share = operand_bytes(quantizer, TOKENS, TOKENS, torch.bfloat16, True, False) / (TOKENS * TOKENS * 2)
    return f"{quantizer}: {share:.2f} of bf16"


def _gathers(layer: Layer, columns: bool, ranks: int) -> str:
    """The end of a note: how a sequence is gathered; empty if none is."""
    assert layer.layouts is not None
    lies = layer.layouts.input if columns else layer.layouts.output
    if not lies.is_shard() or lies.is_shard(-1):
        return ""
    what, recipe = "its input" if columns else "the gradient of its output", layer.recipe
    if recipe is None:
        return f"; {what} is gathered in high precision: the recipe quantizes nothing"
    quantizer, size = (recipe.x, layer.in_features) if columns else (recipe.dy, layer.out_features)
    together = [(True, True)] if not columns else [(True, False), (False, True)]
    unit = math.lcm(*quantizer.side("row").units(0), *quantizer.side("col").units(1))  # tokens that stay together
    cut = Cut(0, 0, ranks, unit * -(-TOKENS // (unit * ranks)))
    rows = cut.size * ranks
    for row, col in together:
        reason = why_high(quantizer, row, col, cut, rows, size, torch.bfloat16)
        if reason is not None:
            return f"; {what} is gathered in high precision: {reason}"
    high = rows * size * torch.bfloat16.itemsize
    shares = [
        f"{operand_bytes(quantizer, rows, size, torch.bfloat16, *directions) / high:.2f}" for directions in together
    ]
    when = f"{shares[0]} of bf16 in forward, {shares[1]} in backward" if columns else f"{shares[0]} of bf16"
    text = f"; {what} is gathered as {quantizer}: {when}"
    text = text if unit == 1 else f"{text}, where each rank has whole blocks of {unit} tokens, else in high precision"
    if columns and layer.layouts.overlap and symmetric.serves(layer.weight.device):
        text += "; it is multiplied as it arrives, where a rank's tokens lie side by side"
    return text


def expert_notes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the note of each module that holds experts and has a recipe."""
    by_holder: dict[str, tuple[Recipe, list[tuple[int, int]]]] = {}
    for stack in expert_stacks(model):
        if stack.recipe is not None:
            n, k = stack.weight.shape[1:]
            _, sizes = by_holder.setdefault(stack.holder_name, (stack.recipe, []))
            sizes.append((k, n) if stack.is_transposed else (n, k))
    yield from ((name, expert_note(*how)) for name, how in by_holder.items())


def expert_note(recipe: Recipe, sizes: list[tuple[int, int]]) -> str:
    """How experts of the sizes ``(outputs, features)`` are multiplied."""
    reasons = {gemm: why_decoded(*pair) for gemm, pair in recipe.products.items()}
    codes = [gemm for gemm, reason in reasons.items() if reason is None]
    slower: dict[str, list[str]] = {}
    for gemm, reason in reasons.items():
        if reason is not None:
            slower.setdefault(reason, []).append(gemm)
    parts = [f"{', '.join(codes)} of codes"] if codes else []
    parts += [f"{', '.join(gemms)} in bf16: {reason}" for reason, gemms in slower.items()]
    if not codes:
        return "; ".join([*parts, "slower than a layer without a recipe"])
    return "; ".join([*parts, *dict.fromkeys(_pays(len(codes), *size) for size in sizes), "measured on an H100"])


def _pays(products: int, outputs: int, features: int) -> str:
    rows = pays_from(products, outputs, features)
    if rows is None:
        return f"{features} x {outputs} is slower than in bf16, however many rows an expert has"
    step = 10 ** max(len(str(rows)) - 2, 0)  # two figures are enough
    return f"{features} x {outputs} is faster than in bf16 from about {math.ceil(rows / step) * step} rows an expert on"
