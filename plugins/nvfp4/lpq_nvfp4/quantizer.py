"""The options of NVFP4, and the two steps of encoding with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from lpq.core import Quantizer, RandomBits, Stat, Storage
from lpq.formats.elements import cast_e2m1, cast_e2m1_stochastic
from lpq.formats.format import Direction
from lpq_nvfp4 import reference, rotation
from lpq_nvfp4.reference import BLOCKS

STATS = {name: (Stat("amax"), Stat("block_amax", block=block)) for name, block in BLOCKS.items()}


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """4-bit floats, with an 8-bit scale for each block and an fp32 amax for the operand."""

    block: Literal["1x16", "16x16"] = "1x16"
    """Square blocks let either operand be derived from the other."""
    rht: bool = False
    """Store the column operand rotated by a random Hadamard transform along the contraction."""
    stochastic: bool = False
    """Round the elements stochastically."""

    @property
    def stats(self) -> tuple[Stat, ...]:
        return STATS[self.block]

    @property
    def transposable(self) -> bool:
        return self.block == "16x16" and not self.rht and not self.stochastic

    @property
    def rotation(self) -> str | None:
        return rotation.NAME if self.rht else None

    def side(self, direction: Direction) -> NVFP4Quantizer:
        return self._unrotated if direction == "row" else self

    @cached_property
    def _unrotated(self) -> NVFP4Quantizer:
        return replace(self, rht=False) if self.rht else self

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amax, block_amax = reference.measure(self._stored(x), BLOCKS[self.block])
        return {"amax": amax, "block_amax": block_amax}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return self._encode(x, stats, cast_e2m1)

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        return self._encode(x, stats, lambda y: cast_e2m1_stochastic(y, bits.bytes(*y.shape)))

    def _encode(self, x: Tensor, stats: Mapping[str, Tensor], cast: Callable[[Tensor], Tensor]) -> Storage:
        amax, block_amax = stats["amax"], stats["block_amax"]
        data, scale = reference.encode(self._stored(x), amax, block_amax, BLOCKS[self.block], cast)
        return self.storage(data=data, scale=scale, amax=amax)

    def _stored(self, x: Tensor) -> Tensor:
        """The matrix in the basis in which it is stored; a rotated one is rounded to bf16."""
        return rotation.rotate(x).bfloat16() if self.rht else x
