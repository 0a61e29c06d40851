"""Which products of a recipe a GPU multiplies as codes. All others are made in bf16, and save no time."""

from __future__ import annotations

import torch

from lpq import registry
from lpq.formats import Quantizer
from lpq.recipes import Recipe

FIRST = ("fp8-current", "mxfp8", "nvfp4")
"""The recipes to begin with, the first that a GPU multiplies before others."""


def capability(device: torch.device) -> int | None:
    """The compute capability of an NVIDIA GPU, as 90 for 9.0; None for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def native_products(recipe: Recipe, sm: int | None, in_groups: bool = False) -> list[str]:
    """The products, of a layer or of rows in groups, whose codes a GPU of this compute capability multiplies; none on
    any other device."""
    return [name for name, (a, b) in recipe.products.items() if sm is not None and is_native(a, b, sm, in_groups)]


def encodes(recipe: Recipe) -> bool:
    """Whether any operand of a recipe is encoded: of bf16's none is."""
    return not all(side.plain for pair in recipe.products.values() for side in pair)


def is_native(a: Quantizer, b: Quantizer, sm: int, in_groups: bool = False) -> bool:
    """Whether some kernel multiplies the codes of two such operands, or of such rows in groups."""
    if a.plain or b.plain:
        return False
    first, second = (registry.format_of(type(q)).name for q in (a, b))
    if in_groups and first != second:
        return False
    if in_groups:
        return has_kernel("grouped_gemm", (first,), sm, a, b)
    return has_kernel("gemm", (first, second), sm, a, b)


def encoded_by_torch(recipe: Recipe, sm: int | None) -> list[Quantizer]:
    """The quantizers of a recipe for which a GPU of this compute capability has no kernel: PyTorch's operators encode,
    of which each reads and writes all elements. None on any other device, whose kernels are not known here."""
    sides = [tensor.side(d) for tensor in (recipe.x, recipe.w, recipe.dy) for d in ("row", "col")]
    return [side for side in dict.fromkeys(sides) if sm is not None and not side.plain and not _is_encoded(side, sm)]


def _is_encoded(side: Quantizer, sm: int) -> bool:
    name = registry.format_of(type(side)).name
    return any(has_kernel(operation, (name,), sm, side) for operation in ("quantize", "tile"))


def reads_codes(row: Quantizer, col: Quantizer, sm: int) -> bool:
    """Whether one kernel makes a matrix's column operand of the codes of its row operand (``lpq.operations.recoding``).
    Without it the row operand is decoded, and the decoded values are encoded."""
    rotated = row.rotation is not None or col.rotation is not None
    if rotated or col.stochastic or any(None in stat.block for stat in col.stats):
        return False
    of_row, of_col = (registry.format_of(type(q)).name for q in (row, col))
    return has_kernel("reader", (of_row,), sm, row) and has_kernel("tile", (of_col,), sm, col)


def has_kernel(operation: str, formats: tuple[str, ...], sm: int, *sides: Quantizer) -> bool:
    """Whether a GPU of this compute capability has a kernel for an operation that serves these quantizers."""
    for kernel in registry.kernels(operation, formats):
        if not (kernel.min_sm or 0) <= sm <= (kernel.max_sm or sm):
            continue
        if kernel.why_not is None or registry.resolve(kernel.why_not)(*sides) is None:
            return True
    return False


def to_begin_with(sm: int | None) -> tuple[str, ...]:
    """The recipes among ``FIRST`` of which the GPU multiplies every product."""
    import lpq

    return tuple(name for name in FIRST if len(native_products(lpq.recipe(name), sm)) == 3)
