"""The options of FP8, the two steps of encoding with them, and what delayed scaling remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lpq.core import Quantizer, Stat, StateBuffer, Storage
from lpq.formats.elements import FLT_MAX
from lpq.formats.layout import Block
from lpq.registry.errors import OptionError
from lpq_fp8 import reference
from lpq_fp8.reference import BLOCKS, ELEMENTS, ROW, TENSOR

STATS = {block: (Stat("amax", block=block, largest=True),) for block in (TENSOR, ROW, *BLOCKS.values())}


@dataclass(frozen=True)
class FP8Quantizer(Quantizer):
    """8-bit floats with fp32 scales. An option that its scaling does not use changes nothing."""

    scaling: Literal["current", "delayed", "row", "block"] = "current"
    """The parts that have a scale each: the tensor (``current``, ``delayed``), each ``row`` of the operand, or each
    ``block``. A scale comes from the amax of its part; in ``delayed`` from the amaxes of the tensor in earlier steps,
    if there is a state that remembers them."""
    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """The element type. E4M3 is finer, E5M2 has more range."""
    pow2: bool | None = None
    """Round scales down to powers of two. None: for ``block`` only."""
    block: Literal["1x128", "128x128"] = "1x128"
    """The blocks of ``block``. Square blocks let either operand be derived from the other."""
    history: int = 1024
    """How many steps ``delayed`` remembers."""
    margin: int = 0
    """The number of powers of two by which the next tensor may exceed the amax that ``delayed`` remembers."""
    algo: Literal["max", "most_recent"] = "max"
    """Which amax ``delayed`` takes from its history. If the amax is 0 or not finite, the scale does not change."""
    fresh: Literal["recall", "measure"] = "recall"
    """The amax with which ``delayed`` encodes before the first step, while it remembers none: ``recall`` takes the
    empty history as it is, for a scale of 1, and ``measure`` the amax of the tensor itself."""
    static: bool = False
    """The scale of a tensor comes from an amax that calibration found."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise OptionError.invalid(type(self).__name__, "history", self.history, "at least 1")
        if self.fresh == "measure" and self.scaling != "delayed":
            needs = "'recall' but for scaling=delayed, which alone remembers amaxes"
            raise OptionError.invalid(type(self).__name__, "fresh", self.fresh, needs)
        if abs(self.margin) > 127:
            raise OptionError.invalid(type(self).__name__, "margin", self.margin, "from -127 to 127")

    @cached_property
    def scaled_block(self) -> Block:
        """Rows and columns that one scale covers."""
        if self.scaling == "block":
            return BLOCKS[self.block]
        return ROW if self.scaling == "row" else TENSOR

    @cached_property
    def pow2_scales(self) -> bool:
        """Whether scales are powers of two."""
        return self.scaling == "block" if self.pow2 is None else self.pow2

    def largest_scale(self, dtype: torch.dtype) -> float:
        """The scale of a tensor in this dtype where it would be infinite."""
        return torch.finfo(dtype).max if self.scaling == "block" else FLT_MAX

    @property
    def by_rows(self) -> FP8Quantizer | None:
        whole = self.scaling in ("current", "delayed")
        return replace(self, scaling="row", fresh="recall", static=False) if whole else None

    @property
    def known_failures(self) -> dict[str, str]:
        if self.scaling != "block" or self.pow2_scales:
            return {}
        test = "test_the_same_numbers_give_the_same_bytes[bf16]"
        return {test: "a scale that would be infinite is the largest number of the dtype, which in bf16 is another one"}

    @property
    def stats(self) -> tuple[Stat, ...]:
        return STATS[self.scaled_block]

    @property
    def transposable(self) -> bool:
        rows, cols = self.scaled_block
        return rows == cols

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": reference.measure(x, self.scaled_block)}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        data, scale = reference.encode(
            x,
            stats["amax"],
            self.scaled_block,
            ELEMENTS[self.dtype],
            largest_scale=self.largest_scale(x.dtype),
            pow2=self.pow2_scales,
        )
        return self.storage(data=data, scale=scale)

    @property
    def rounds_scales(self) -> bool:
        return self.pow2_scales

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor:
        storage = self._unrounded.encode(x, stats)
        return reference.decode(storage.data, storage.scale, self.scaled_block)

    @cached_property
    def _unrounded(self) -> FP8Quantizer:
        return replace(self, pow2=False)

    # ------------------------------------------------------------------------------ delayed scaling

    @property
    def state(self) -> tuple[StateBuffer, ...]:
        if self.static or self.scaling != "delayed":
            return super().state
        return StateBuffer("amax_history", (self.history,)), StateBuffer("amax")

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"amax": state["amax"]}

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        history, amax = state["amax_history"], state["amax"]
        history.copy_(reference.pushed(history, stats["amax"]))
        amax.copy_(reference.next_amax(history, amax, self.margin, self.algo))
