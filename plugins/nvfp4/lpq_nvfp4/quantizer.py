"""The options of NVFP4, and the two steps of encoding with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from lpq.core import Quantizer, RandomBits, Rotation, Stat, StateBuffer, Storage
from lpq.formats.elements import cast_e2m1, cast_e2m1_stochastic
from lpq.formats.format import Direction
from lpq.formats.rotation import HADAMARD
from lpq.registry.errors import OptionError
from lpq_nvfp4 import eden, reference
from lpq_nvfp4.reference import BLOCKS
from lpq_nvfp4.search import four_over_six, searched

WORDS: dict[str, tuple[Any, ...]] = {
    "search": ("amax", "mse", "four_over_six"),
    "error": ("mse", "mae"),
    "norm": (256, 448),
    "scaling": tuple(reference.SCALED),
}
"""The values of options of which the conformance kit does not try all."""
PLAIN = ("1x16", False, "amax")
"""The values of ``block``, ``rht`` and ``search`` that MS-EDEN has."""
AMAX = (Stat("amax", largest=True),)
STATE = (StateBuffer("amax"),)
STATS = {
    (name, rht, scaling): (
        Stat("amax", block=scaled, largest=not rht), Stat("block_amax", block=block, largest=not rht)
    )
    for name, block in BLOCKS.items()
    for rht in (False, True)
    for scaling, scaled in reference.SCALED.items()
}  # fmt: skip


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """4-bit floats, with an 8-bit scale for each block and an fp32 amax for the operand, or for each of its rows."""

    block: Literal["1x16", "16x16"] = "1x16"
    """Square blocks let either operand be derived from the other."""
    rht: bool = False
    """Store the column operand rotated by a random Hadamard transform along the contraction."""
    stochastic: Literal[False, True, "unbiased", "eden"] = False
    """Round the elements stochastically. ``unbiased``: scales leave room, so that no element is cut at 6. ``eden``:
    rotate 128 columns by signs that each pass draws, and round the scales stochastically, not the elements; this is for
    both operands of a product."""
    static: bool = False
    """The amax of the operand is one that calibration found."""
    search: str = "amax"
    """Which scale a block gets: the scale of its ``amax``; of all scales the one with the least ``mse``; or
    ``four_over_six``, the better of two scales, which map the amax to 4 and to 6. ``mse`` has no kernels, and takes a
    hundred times as long as encoding: it is for weights that are held or exported."""
    error: str = "mse"
    """The error by which ``four_over_six`` chooses: the sum of squares, ``mse``, or of magnitudes, ``mae``."""
    norm: int = 448
    """The scale of the block that has the operand's amax, if that becomes 6: 448, or 256 with ``four_over_six``, so
    that it can become 4, too."""

    scaling: str = "tensor"
    """The part of an operand that has an amax: the whole, as of a ``tensor``, or each ``row``. ``delayed``, with
    ``stochastic=eden`` only: the whole, and in a layer the amax is the one that the tensor had in the step before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, words in WORDS.items():
            if getattr(self, name) not in words:
                raise OptionError.invalid(type(self).__name__, name, getattr(self, name), " or ".join(map(repr, words)))
        if self.search != "four_over_six" and (self.error, self.norm) != ("mse", 448):
            raise OptionError("nvfp4: error and norm are options of search=four_over_six: set that, or leave them out")
        if self.stochastic == "unbiased" and self.searches:
            raise OptionError(
                "nvfp4: stochastic=unbiased needs scales that cut no element, and a search may choose others: leave "
                "search out, or set stochastic=true"
            )
        if self.norm != 448 and self.stochastic:
            raise OptionError("nvfp4: norm=256 chooses scales by rounding to the nearest: leave stochastic out")
        if self.scaling == "row" and (self.block != "1x16" or self.rht or self.static):
            raise OptionError(
                "nvfp4: with scaling=row leave out block, rht and static: a row has its own amax, in blocks of 1x16"
            )
        if self.eden and ((self.block, self.rht, self.search) != PLAIN or self.scaling == "row"):
            raise OptionError(
                "nvfp4: stochastic=eden rotates 128 columns and finds scales of its own: leave block, rht, search and "
                "scaling=row out"
            )
        if self.delayed and not self.eden:
            raise OptionError(
                "nvfp4: scaling=delayed is for stochastic=eden, whose scales have room for a tensor that grows: set "
                "that, or leave scaling out"
            )

    @property
    def eden(self) -> bool:
        """Whether it is MS-EDEN."""
        return self.stochastic == "eden"

    @property
    def delayed(self) -> bool:
        """Whether a layer takes the amax of the step before."""
        return self.scaling == "delayed"

    @property
    def stats(self) -> tuple[Stat, ...]:
        if self.stochastic == "eden":
            return AMAX
        return STATS[self.block, self.rht, self.scaling]

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.stochastic in ("unbiased", "eden")

    @cached_property
    def without_random_bits(self) -> NVFP4Quantizer | None:  # type: ignore[override]
        return replace(self, stochastic=False) if self.stochastic is True else None  # no other leaves room in scales

    @property
    def searches(self) -> bool:
        """Whether scales depend on more than amaxes."""
        return self.search != "amax"

    @property
    def transposable(self) -> bool:
        return self.block == "16x16" and not self.rht and not self.stochastic

    @property
    def by_rows(self) -> NVFP4Quantizer | None:
        whole = self.block == "1x16" and self.scaling == "tensor" and not (self.rht or self.eden)
        return replace(self, scaling="row", static=False) if whole else None

    def frozen(self, search: str | None = None, *, static: bool = True) -> Quantizer:
        search = None if self.unbiased else search
        if search not in (None, self.search) and (self.error, self.norm) != ("mse", 448):  # of its own search
            return replace(self, error="mse", norm=448).frozen(search, static=static)
        return super().frozen(search, static=static)

    @property
    def rotation(self) -> Rotation | None:
        if self.eden:
            return eden.DRAWN
        return HADAMARD if self.rht else None

    def side(self, direction: Direction) -> NVFP4Quantizer:
        return self.unrotated if direction == "row" and self.rht else self

    @property
    def without_rotation(self) -> NVFP4Quantizer | None:  # type: ignore[override]
        return self.unrotated if self.rht else None

    @cached_property
    def unrotated(self) -> NVFP4Quantizer:
        """The quantizer of the stored values, if they were not rotated."""
        if self.eden:
            return replace(self, stochastic=False, scaling="tensor")
        return replace(self, rht=False) if self.rht else self

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amax, block_amax = reference.measure(self._stored(x), BLOCKS[self.block], reference.SCALED[self.scaling])
        return {"amax": amax} if self.stochastic == "eden" else {"amax": amax, "block_amax": block_amax}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        if self.stochastic == "eden":
            raise TypeError(f"{self} is rotated by signs that are drawn: it encodes with random bits alone")
        return self._encode(x, stats, cast_e2m1)

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        if self.stochastic == "eden":
            data, scale, amax = eden.encode(x, stats["amax"], bits)
            return self.storage(data=data, scale=scale, amax=amax, turn=bits.turn)
        return self._encode(x, stats, lambda y: cast_e2m1_stochastic(y, bits.bytes(*y.shape)))

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor | None:
        if self.eden:
            return None
        largest = reference.ROOMY_MAX if self.unbiased else reference.E2M1_MAX
        return reference.unrounded(self._stored(x), stats["block_amax"], BLOCKS[self.block], largest)

    def _encode(self, x: Tensor, stats: Mapping[str, Tensor], cast: Callable[[Tensor], Tensor]) -> Storage:
        amax, block_amax = stats["amax"], stats["block_amax"]
        choose = searched if self.search == "mse" else None
        largest = reference.E2M1_MAX
        if self.search == "four_over_six":
            choose = partial(four_over_six, amax=amax, norm=self.norm, absolute=self.error == "mae")
            amax = reference.with_room(amax, reference.E4M3_MAX / self.norm)
        if self.unbiased:
            largest, amax = reference.ROOMY_MAX, reference.with_room(amax, reference.ROOM)
        data, scale = reference.encode(self._stored(x), amax, block_amax, BLOCKS[self.block], cast, choose, largest)
        return self.storage(data=data, scale=scale, amax=amax)

    def _stored(self, x: Tensor) -> Tensor:
        """The matrix as it is stored: a rotated one is rounded to bf16."""
        return x.bfloat16() if self.rht else x

    # ------------------------------------------------------------------------------ the amax of the step before

    @property
    def state(self) -> tuple[StateBuffer, ...]:
        return super().state if self.static or not self.delayed else STATE

    @property
    def fresh(self) -> str:  # type: ignore[override]
        return "measure" if self.delayed else "recall"

    def recall(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        return {"amax": state["amax"]} if self.moves else super().recall(state)

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        amax = stats["amax"]
        state["amax"].copy_(torch.where((amax > 0) & (amax < torch.inf), amax, state["amax"]))
