"""Formats whose rounding is safe in the states of an optimizer. A format is tried out once, on a CPU, in numbers of all
sizes: nothing that it declares says how it rounds the least elements of a block.

A first moment must not come back larger than twice what it was. A second moment divides, so its root must not come back
smaller than half of what it was, and never as zero: ``raised`` lifts the elements that the format would lose to the
least share of their block that it keeps. No share helps where scales end before fp32 does: such a format loses whole
tensors. And a second moment that falls slowly must fall: where scales are powers of two, an element that is rounded to
the nearest stays what it is, for ever.

Beside a larger element of its block, an element that changes by less than half a step of the format in each step of the
optimizer stays what it is in any format. So a second moment may stay too small, by a factor that follows from that half
step: ``cautions`` has words for formats in which it is large, and for first moments that do not fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats import Quantizer, Stat
from lpq.formats.blocks import block_amax, expand_blocks
from lpq.operations.decoding import decode_reference
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference

TWICE = 2.0
"""The factor by which rounding may enlarge a first moment, and lessen the root of a second moment."""
ROWS, COLS = 256, 512
LEAST = 40
"""Elements are tried down to this power of two below the largest of their block."""
LEAST_ROOT = 2.0**-75
"""The least root of a square that fp32 holds; the largest is below 2^64."""
SIZES = 2.0**-60, 1.0, 2.0**60
"""The largest elements of the tensors that are tried: a format that keeps one may lose all of another."""
RISE = 1 + 2**-4
"""How much a root has to grow in a format of three bits of mantissa until it is stored larger. More is warned of."""
SPAN = 13
"""Elements that change beside a larger one are tried down to this power of two below it."""
LOSES = "it loses small elements beside large ones"
DECLARED = ", also where they are raised to a share of the amaxes that it declares: choose another format"
UNDECLARED = (
    ", and declares no amax to a share of which they could be raised: if it scales by the amaxes of blocks, "
    "declare that statistic so, Stat(…, largest=True); else choose another format"
)


class LeastKept(NamedTuple):
    """The least elements that a format keeps: a share of the statistic that covers them."""

    stat: Stat
    share: float


def rounded(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Encode a matrix, and return the values that it decodes to, by the reference, whatever kernels are asked for."""
    buffers = quantize_reference(x, measure_reference(x, quantizer, None), quantizer, None, None, 0, False)
    operand = quantizer.storage.from_tensors(buffers, quantizer, tuple(x.shape), x.dtype)
    return decode_reference(operand, torch.float32)


@cache
def why_not(quantizer: Quantizer) -> str | None:
    """Why no state can be stored in a format; None if it can."""
    if quantizer.stochastic:
        return "it rounds at random, so that replicas and shards would part"
    if bool((rounded(quantizer, torch.zeros(ROWS, COLS, dtype=torch.float32)) != 0).any()):
        return "it does not keep a tensor of zeros, with which states begin"
    x = _numbers()
    if bool((rounded(quantizer, x).abs() > TWICE * x.abs()).any()):
        return "it rounds elements to more than twice what they are, as formats that rotate do"
    return None


@cache
def least_kept(quantizer: Quantizer, fall: float) -> LeastKept | str | None:
    """The least roots of second moments that a format keeps; None if it keeps all. Or, in words, why it is not safe.

    Args:
        quantizer: The quantizer of the row operand.
        fall: The factor by which a root falls in a step without a gradient.
    """
    least = next(_that_keep(quantizer), LOSES + (DECLARED if any(s.largest for s in quantizer.stats) else UNDECLARED))
    if isinstance(least, str):
        return least
    for size in SIZES:
        exact = _numbers().abs() * size
        exact = torch.where(exact < LEAST_ROOT, 0.0, exact)
        if not _keeps(quantizer, exact, least):
            return (
                f"it loses elements of a tensor whose largest is about {size:.0e}: let its scales be in fp32, and "
                "bound them neither from below, as by clamp(min=1e-12), nor from above"
            )
        roots = rounded(quantizer, raised(exact, least))
        next_roots = rounded(quantizer, raised(roots * fall, least))
        if fall < 1 and bool((next_roots >= roots)[roots > 0].any()):
            return (
                f"what falls by a factor of {fall:.5g} in a step would never fall in it: choose a format of blocks "
                "with scales in fp32"
            )
    return least


def _keeps(quantizer: Quantizer, roots: Tensor, least: LeastKept | None) -> bool:
    """Whether no root is stored as less than half of it."""
    return bool((rounded(quantizer, raised(roots, least)) * TWICE >= roots).all())


def _that_keep(quantizer: Quantizer) -> Iterator[LeastKept | None]:
    x = _numbers().abs()
    largest = [stat for stat in quantizer.stats if stat.largest]
    candidates: list[LeastKept | None] = [None]
    for stat in sorted(largest, key=lambda s: [size or COLS for size in s.block]):
        candidates += [LeastKept(stat, 2.0**-power) for power in range(LEAST, 0, -1)]
    for least in candidates:
        if _keeps(quantizer, x, least):
            yield least


@cache
def rise(quantizer: Quantizer, least: LeastKept | None) -> float:
    """How much a root has to grow, beside a larger one of its block, until it is stored larger, at the most."""
    low, high = 1.0, TWICE
    for _ in range(14):
        factor = (low + high) / 2
        low, high = (factor, high) if stays(quantizer, factor, least) else (low, factor)
    return high


def stays(quantizer: Quantizer, factor: float, least: LeastKept | None = None) -> bool:
    """Whether an element that changes by this factor, beside a larger one that does not, may be stored as it was."""
    sizes, drawn = _drawn(torch.Generator("cpu").manual_seed(0), 2, ROWS // 4, COLS)
    x = (-SPAN * sizes).exp2()
    before = rounded(quantizer, raised(x, least))
    chosen = (drawn < 0.25) & (x < 0.5) & (before > 0)
    after = rounded(quantizer, raised(torch.where(chosen, before * factor, before), least))
    return bool((after <= before if factor > 1 else after >= before)[chosen].any())


def too_large(grown: float, fall: float) -> float:
    """How many times too large the updates by steady gradients may stay, where a root is stored as it was until it has
    ``grown``: the gradient is then the largest that leaves it there. ``fall`` is below 1."""
    return math.sqrt((grown**2 - fall**2) / (1 - fall**2)) / grown


def cautions(quantizer: Quantizer, second: bool, fall: float, least: LeastKept | None, divided: bool) -> str | None:
    """The harm that a format may do to a state, though it is taken, and the remedy, in words; None if there is none.

    Args:
        quantizer: The quantizer of the row operand.
        second: Whether the state is a second moment.
        fall: The factor by which it, or its root, falls in a step without a gradient.
        least: The least roots that the format keeps.
        divided: Whether the optimizer has a second moment, by which this state is divided.
    """
    if not second:
        if not divided or fall >= 1 or not stays(quantizer, fall):
            return None
        return (
            f"in which an element beside a larger one of its block may not fall by a factor of {fall:.3g}: without a "
            "gradient its weight moves on, by more in each step as its second moment falls. Choose a finer format, or "
            "none for this state"
        )
    told: list[str] = []
    if least is not None and least.stat.of_all:
        told.append(
            f"which keeps one range for a whole tensor: a root below {least.share:.3g} of the largest in its tensor is "
            "stored as that, so its weight moves slowly"
        )
    grown = rise(quantizer, least)
    if grown > RISE + 1e-3:
        times = f"{too_large(grown, fall):.3g} times " if fall < 1 else ""
        told.append(
            "in which a root beside a larger one of its block is stored as it was until it has grown by a factor of "
            f"{grown:.3g}: where a gradient grows for good, updates may stay {times}too large"
        )
    remedy = "Choose a format of blocks with scales in fp32, for each row or smaller blocks, and three bits of mantissa"
    return f"{', and '.join(told)}. {remedy}" if told else None


def root_of(x: Tensor) -> Tensor:
    """The root in fp32, rounded once: by torch's own on a CPU the last bit depends on the place in a vector."""
    return x.double().sqrt_().float()


def raised(root: Tensor, least: LeastKept | None, amax: Tensor | None = None) -> Tensor:
    """The matrix of roots with its elements at least the least that the format keeps. Zero stays zero.

    ``amax``: the statistic, if it is known.
    """
    if least is None:
        return root
    amax = block_amax(root, least.stat.block) if amax is None else amax
    floor = expand_blocks(amax * least.share, least.stat.block, *root.shape)
    return torch.where(root > 0, torch.maximum(root, floor), root)


@cache
def _numbers() -> Tensor:
    """Numbers of both signs and all sizes, some of which are zero, in blocks that are near zero or large."""
    random = torch.Generator("cpu").manual_seed(0)

    def drawn(high: int, wide: int) -> Tensor:
        coarse = _drawn(random, ROWS // high, COLS // wide)
        return coarse.repeat_interleave(high, 0).repeat_interleave(wide, 1)

    sizes = drawn(1, 1) * LEAST + sum(drawn(*block) * 10 for block in ((1, 16), (16, 16), (128, 128)))
    return (-sizes).exp2() * (drawn(1, 1) - 0.5).sign() * (drawn(1, 1) > 0.05)


def _drawn(random: torch.Generator, *shape: int) -> Tensor:
    """Numbers from 0 to 1, whatever tensors are by default."""
    return torch.rand(shape, generator=random, device="cpu", dtype=torch.float32)
