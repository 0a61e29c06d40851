"""A small model of each GPU: rates, bytes and launches, from which the time of a linear layer's step follows.

The time of a step is the time of its three products, at the rates below, and of the bytes that encoding and decoding
move, at the speed of a copy. Where the arithmetic of encoding takes longer than its bytes, the arithmetic counts:
codes, random bits and rotations take operations, and a format declares which of them it has. The host launches
meanwhile; the slower of the two decides, and where both take about as long they hinder each other. Products of rows in
groups, as experts have them, are made tile by tile, so that the time to fill and drain a tile counts.
``tests/bench/test_predictions.py`` compares all of it with the stored results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lpq import recipes as recipes_of
from lpq.bench.layers import LayerSize, StackSize
from lpq.bench.native import native_products, reads_codes
from lpq.formats import Quantizer
from lpq.recipes import Recipe
from lpq.recipes.gemms import GEMMS

BF16, FP32 = 2, 4
NARROW = 0.75
"""The bytes of an element below which codes have about 4 bits."""
ALIGNED = 16
"""Codes are multiplied where lines of them, and of the result, are multiples of this many elements; twice as many of
codes of 4 bits, and with scales of 32. Other products are made in bf16."""
TOGETHER = 4
"""The exponent by which the times of GPU and host are joined: high, as the slower one hides the other."""
FILL = 600
"""The depth, in bytes, that filling and draining the pipeline adds to each tile of a product of groups. Products of one
layer hide it behind other tiles."""
BLOCKS_IN_GROUPS = 0.83
"""The rate of products of groups with scales along the contraction, as a part of ``Gpu.blocks``: another kernel makes
them. Both were fitted to ``benchmarks/results/grouped.json``."""
ENCODED, ENCODED_NARROW, DRAWN, MIXED = 19, 29, 20, 5
"""The operations for an element of an operand: to find its code, and its code of about 4 bits; to draw its random bits;
and for each time that a rotation adds it to another element. They were fitted to ``benchmarks/results/casts*.json``,
where kernels with random bits or a rotation take as long on an H100 as on an H200."""
USUAL_SHARE = 0.7
"""The part of a data sheet's dense rate, and of its memory bandwidth, that a GPU nobody measured is assumed to reach:
an H100 reaches as much in bf16."""
STORED = (
    "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp8-fwd-nvfp4-bwd", "mxfp8-fwd-bf16-bwd", "nvfp4",
    "nvfp4-fwd-mxfp8-bwd", "nvfp4-fwd-bf16-bwd",
)  # fmt: skip
"""The recipes of the layers in ``benchmarks/results``."""
Pair = tuple[Quantizer, Quantizer]


@dataclass(frozen=True)
class Gpu:
    """The rates of a GPU in operations and bytes a second, as they last in training."""

    title: str
    sm: int | None
    """The compute capability, as 90 for 9.0; None: it is not NVIDIA's."""
    bf16: float
    codes: float
    """The rate of products of 8-bit codes with a scale for the whole tensor."""
    rows: float
    """The same with a scale for each row."""
    blocks: float
    """The same with scales along the contraction, which are applied to sums of each block."""
    narrow: float
    """The rate of products of codes of 4 bits."""
    copy: float
    """Bytes a second, read and written."""
    arithmetic: float
    """The rate of operations in fp32 outside products, as the data sheet has it."""
    memory: int
    """GiB."""
    measured: bool = False
    """Whether the rates are from ``benchmarks/results``; else from a data sheet."""
    base: float = 170e-6
    """Seconds of the host for a layer without a recipe, forward and backward."""
    launch: float = 18e-6
    """Seconds of the host for each launch that a recipe adds."""


def _from_sheet(
    title: str, sm: int | None, bf16: float, codes: float, narrow: float, copy: float, arithmetic: float, memory: int
) -> Gpu:
    """A GPU by the dense rates and the bandwidth of its data sheet, in units of 1e12."""
    unit = USUAL_SHARE * 1e12
    eight = unit * codes
    return Gpu(title, sm, unit * bf16, eight, eight, eight, unit * narrow, unit * copy, arithmetic * 1e12, memory)


GPUS = {
    "h100": Gpu("H100 SXM", 90, 695e12, 1325e12, 1250e12, 1030e12, 0, 2.98e12, 67e12, 80, measured=True),
    "h200": Gpu("H200 SXM", 90, 690e12, 1305e12, 1265e12, 1010e12, 0, 4.2e12, 67e12, 141, measured=True),
    "a100": _from_sheet("A100 SXM", 80, 312, 0, 0, 2.0, 19.5, 80),
    "l40s": _from_sheet("L40S", 89, 362, 733, 0, 0.86, 91.6, 48),
    "rtx4090": _from_sheet("RTX 4090", 89, 165, 330, 0, 1.0, 82.6, 24),
    "b200": _from_sheet("B200", 100, 2250, 4500, 9000, 8.0, 75, 180),
    "mi300": _from_sheet("MI300X", None, 1307, 2615, 0, 5.3, 163.4, 192),
    "mi355": _from_sheet("MI355X", None, 2517, 5033, 0, 8.0, 157.3, 288),
}
"""The GPUs by the names that ``lpq advise --gpu`` takes."""


def key_of(device_name: str) -> str | None:
    """The name in ``GPUS`` of a GPU as its driver calls it; None if there is none."""
    compact = device_name.lower().replace(" ", "")
    return next((name for name in GPUS if name in compact), None)


def predicted(gpu: Gpu, size: LayerSize, recipe: Recipe | None, host: float | None = None) -> float:
    """Predict the seconds of a step of one layer, forward and backward.

    Args:
        gpu: The GPU.
        size: The size of the layer, and its tokens.
        recipe: The recipe of its products; None: bf16.
        host: The seconds of the host, where they are known; None: by launches.
    """
    native = {} if recipe is None else _native(gpu, size, recipe)
    pairs = map(native.get, GEMMS)
    on_gpu = sum(_product(gpu, size, depth, pair) for depth, pair in zip(size.depths, pairs, strict=True))
    launches = 0
    if recipe is not None:
        for tensor, elements in zip(("x", "w", "dy"), size.tensors, strict=True):
            seconds, more = _encoding(gpu, recipe, tensor, native, isinstance(size, StackSize))
            on_gpu += elements * seconds
            launches += more
    return _joined(on_gpu, gpu.base + gpu.launch * launches if host is None else host)


def is_compared(recipe: Recipe) -> bool:
    """Whether all operands of a recipe are operands of stored layers, too. Codes that are made of the other operand's
    codes are not: no stored layer has them. Such times follow from counts alone."""
    stored = [side for name in STORED for tensor in _tensors(recipes_of.recipe(name)) for side in _sides(tensor)]
    of_codes = any(tensor.col_source == "row" and not tensor.side("col").plain for tensor in _tensors(recipe))
    return not of_codes and all(side in stored for tensor in _tensors(recipe) for side in _sides(tensor))


def _tensors(recipe: Recipe) -> tuple[Quantizer, ...]:
    return recipe.x, recipe.w, recipe.dy


def _sides(tensor: Quantizer) -> list[Quantizer]:
    """The operands of a tensor that are encoded."""
    return [side for side in (tensor.side("row"), tensor.side("col")) if not side.plain]


def _joined(on_gpu: float, on_host: float) -> float:
    return float((on_gpu**TOGETHER + on_host**TOGETHER) ** (1 / TOGETHER))


def _product(gpu: Gpu, size: LayerSize, depth: int, pair: Pair | None) -> float:
    """Seconds of a product that sums over ``depth`` elements, of these codes; ``pair`` is None: in bf16."""
    in_groups = isinstance(size, StackSize)
    rate, width = gpu.bf16, float(BF16)
    if pair is not None:
        width = max(map(bytes_of_element, pair))
        rate = gpu.codes
        if width < NARROW:
            rate = gpu.narrow
        elif any(map(_scales_along, pair)):
            rate = gpu.blocks * (BLOCKS_IN_GROUPS if in_groups else 1)
        elif any(map(_scales_of_rows, pair)):
            rate = gpu.rows
    filled = FILL / (depth * width) if in_groups else 0
    return 2 * size.tokens * size.inputs * size.outputs / rate * (1 + filled)


def _native(gpu: Gpu, size: LayerSize, recipe: Recipe) -> dict[str, Pair]:
    """The operands of the products whose codes the GPU multiplies at this size."""
    found = native_products(recipe, gpu.sm, isinstance(size, StackSize))
    lines = dict(zip(GEMMS, size.lines, strict=True))
    return {name: recipe.products[name] for name in found if _is_aligned(*lines[name], *recipe.products[name])}


def _is_aligned(depth: int, cols: int, *sides: Quantizer) -> bool:
    """Whether codes are multiplied in lines of ``depth``, with lines of ``cols`` in the result."""
    scaled_by_32 = any(buffer.block[1] == 2 * ALIGNED for side in sides for buffer in side.layout)
    narrow = any(bytes_of_element(side) < NARROW for side in sides)
    return depth % (ALIGNED * (2 if narrow or scaled_by_32 else 1)) == 0 and cols % ALIGNED == 0


def _scales_along(side: Quantizer) -> bool:
    """Whether there are several scales along the contraction."""
    return any((buffer.block[1] or 0) >= 16 for buffer in side.layout)


def _scales_of_rows(side: Quantizer) -> bool:
    """Whether each row has one scale."""
    return any(buffer.block == (1, None) for buffer in side.layout)


def bytes_of_element(side: Quantizer) -> float:
    """The bytes that an operand takes for an element, scales included."""
    if side.plain:
        return BF16
    shape = (1024, 1024)
    return float(side.storage.empty(side, shape, torch.bfloat16, torch.device("meta")).nbytes) / (shape[0] * shape[1])


def _encoding(gpu: Gpu, recipe: Recipe, tensor: str, native: Collection[str], in_groups: bool) -> tuple[float, int]:
    """The seconds for each element of a tensor, and the launches, besides the products. ``native``: the products whose
    codes are multiplied."""
    whole: Quantizer = getattr(recipe, tensor)
    of = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}[tensor]
    sides = {d: whole.side(d) for d in ("row", "col")}
    encoded = {d: side for d, side in sides.items() if not side.plain}
    if not encoded:
        return 0.0, 0
    is_made_of_row = whole.col_source == "row" and len(encoded) == 2
    written: dict[str, float] = {}
    has_state = any(side.state for side in encoded.values())
    read_again, launches = 0.0, int(has_state)
    for gemm, (direction, side) in zip(of, sides.items(), strict=True):
        if side.plain:
            continue
        is_saved = direction == "col" and tensor != "dy"
        if gemm in native:
            written[direction] = bytes_of_element(side)
        elif is_saved or is_made_of_row or has_state:  # codes, which are decoded for the product
            written[direction] = bytes_of_element(side)
            read_again += bytes_of_element(side) + BF16
            launches += 1
        else:
            written[direction] = BF16
    if is_made_of_row:
        seconds = encoding(gpu, [sides["row"]], written["row"])
        launches += 1 + _is_measured(sides["row"])
        more, launched = _of_codes(gpu, sides["row"], sides["col"], written["col"], in_groups)
        seconds, launches = seconds + more, launches + launched
    else:
        seconds = encoding(gpu, [*encoded.values()], sum(written.values()))
        launches += 1 + any(map(_is_measured, encoded.values()))
    if recipe.saves.get(tensor, "encoded") != "encoded" and "col" in encoded:  # backward reads the tensor itself
        read_again += BF16
    return seconds + read_again / gpu.copy, launches


def encoding(gpu: Gpu, sides: Sequence[Quantizer], written: float, read: float = BF16) -> float:
    """The seconds to encode an element into all these operands at once: as long as its bytes or as its arithmetic
    takes, and one more read where a statistic must be known beforehand.

    Args:
        gpu: The GPU.
        sides: The quantizers of the operands.
        written: The bytes of an element in all operands.
        read: The bytes of an element in the tensor.
    """
    operations = sum(map(_operations, sides))
    encoded = max((read + written) / gpu.copy, operations / gpu.arithmetic)
    return encoded + any(map(_is_measured, sides)) * read / gpu.copy


def _operations(side: Quantizer) -> float:
    """The operations that encode an element of an operand, by what the format declares."""
    count = float(ENCODED_NARROW if bytes_of_element(side) < NARROW else ENCODED) + DRAWN * bool(side.stochastic)
    if side.rotation is not None:
        block = side.rotation.block
        count += MIXED * (block if side.rotation.matrix is not None else block.bit_length() - 1)
    return count


def _of_codes(gpu: Gpu, row: Quantizer, col: Quantizer, written: float, in_groups: bool) -> tuple[float, int]:
    """The seconds for each element, and the launches, to make the column operand of the row operand's codes."""
    read = bytes_of_element(row)
    if gpu.sm is not None and not in_groups and reads_codes(row, col, gpu.sm):
        return encoding(gpu, [col], written, read), 1
    return (read + FP32) / gpu.copy + encoding(gpu, [col], written, FP32), 2 + _is_measured(col)


def _is_measured(side: Quantizer) -> bool:
    """Whether the values are read once more, for a statistic that must be known before the first is encoded."""
    return not side.state and any(None in stat.block for stat in side.stats)
