"""Lines of a report on experts: how their products are computed, and from how many rows on they beat bf16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from lpq.nn.expert_stacks import expert_stacks
from lpq.operations.group_choice import pays_from, why_decoded

if TYPE_CHECKING:
    from lpq.recipes import Recipe


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
