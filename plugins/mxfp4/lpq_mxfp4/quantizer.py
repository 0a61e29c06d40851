"""The options of MXFP4, and the two steps of encoding with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from lpq.core import Quantizer, RandomBits, Rotation, Stat, Storage
from lpq.formats.elements import cast_e2m1, cast_e2m1_stochastic
from lpq.formats.format import Direction
from lpq.formats.rotation import HADAMARD
from lpq.registry.errors import OptionError
from lpq_mxfp4 import reference

STATS = {rht: (Stat("amax", block=reference.BLOCK, largest=not rht),) for rht in (False, True)}


@dataclass(frozen=True)
class MXFP4Quantizer(Quantizer):
    """4-bit floats, with a power-of-two scale for each 32 along the contraction."""

    scale: Literal["floor", "even", "ceil"] = "floor"
    """The scale of a block is the power of two that takes its amax into [4, 8) with ``floor``, into [3.5, 7) with
    ``even``, or into (3, 6] with ``ceil``. Elements above 6 saturate."""
    rht: bool = False
    """Store the column operand rotated by a random Hadamard transform along the contraction."""
    stochastic: bool = False
    """Round the elements stochastically: without a bias with ``scale=ceil``, where none saturates. ``scale=floor`` does
    not go with it: it cuts the largest elements by up to a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic and self.scale == "floor":
            raise OptionError(
                "mxfp4: scale=floor cuts the largest elements by up to a quarter, so stochastic rounding would have a "
                "bias: set scale=ceil, which has none, or scale=even, which cuts by a seventh at most"
            )

    @property
    def stats(self) -> tuple[Stat, ...]:
        return STATS[self.rht]

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.stochastic and self.scale == "ceil"

    @cached_property
    def without_random_bits(self) -> MXFP4Quantizer | None:  # type: ignore[override]
        return replace(self, stochastic=False) if self.stochastic else None

    @property
    def rotation(self) -> Rotation | None:
        return HADAMARD if self.rht else None

    @cached_property
    def without_rotation(self) -> MXFP4Quantizer | None:  # type: ignore[override]
        return replace(self, rht=False) if self.rht else None

    def side(self, direction: Direction) -> MXFP4Quantizer:
        return self if direction == "col" or self.without_rotation is None else self.without_rotation

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": reference.measure(self._stored(x))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return self._encode(x, stats, cast_e2m1)

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        return self._encode(x, stats, lambda y: cast_e2m1_stochastic(y, bits.bytes(*y.shape)))

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor:
        return reference.unrounded(self._stored(x), stats["amax"])

    def _encode(self, x: Tensor, stats: Mapping[str, Tensor], cast: Callable[[Tensor], Tensor]) -> Storage:
        data, scale = reference.encode(self._stored(x), stats["amax"], self.scale, cast)
        return self.storage(data=data, scale=scale)

    def _stored(self, x: Tensor) -> Tensor:
        """The matrix as it is stored: a rotated one is rounded to bf16."""
        return x.bfloat16() if self.rht else x
