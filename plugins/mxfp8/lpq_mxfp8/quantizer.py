"""The options of MXFP8, and the two steps of encoding with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lpq.core import Quantizer, Stat, Storage
from lpq_mxfp8 import reference
from lpq_mxfp8.reference import ELEMENTS


@dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """8-bit floats, with a power-of-two scale for each 32 along the contraction."""

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """The element type. E4M3 is finer, E5M2 reaches further below a block's largest element."""

    stats = (Stat("amax", block=reference.BLOCK, largest=True),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": reference.measure(x)}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        data, scale = reference.encode(x, stats["amax"], ELEMENTS[self.dtype])
        return self.storage(data=data, scale=scale)

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor:
        return reference.unrounded(x, stats["amax"], ELEMENTS[self.dtype])
