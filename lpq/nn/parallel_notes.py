"""Lines of a report about sharded layers: which of their tensors travel, and how."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any

import torch
from torch import nn

from lpq.distributed.shardability import operand_bytes, why_high
from lpq.formats import Quantizer
from lpq.formats.sections import why_not_row_by_row
from lpq.nn.linear import Layer
from lpq.operations.cut import Cut
from lpq.torch_private import symmetric

TOKENS = 2**14
"""Tokens of a sequence in a batch for which bytes are counted; more or fewer change them little."""


def parallel_notes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer that a style of ``lpq.distributed`` shards, with the style and the tensors that
    travel."""
    for name, module in model.named_modules():
        if getattr(module, "dispatched", None) is not None:
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
    if module.dispatched == "high_precision" or module.recipe is None:
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
    unit = _unit(quantizer)
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


def _unit(quantizer: Quantizer) -> int:
    """The number of tokens that must stay together."""
    return lcm(*quantizer.side("row").units(0), *quantizer.side("col").units(1))
