"""A format as a third party makes it of others: what one quantizer leaves of a matrix is encoded by a second one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats import parts
from lpq.formats.format import Direction


class ResidualStorage(Storage):
    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        return parts.named(base=quantizer.base.layout, rest=quantizer.rest.layout)

    def _parts(self) -> dict[str, Storage]:
        quantizer = cast("ResidualQuantizer", self.quantizer)
        return {
            "base": parts.part(self, "base", quantizer.base),
            "rest": parts.part(self, "rest", quantizer.rest),
        }

    def decode(self) -> Tensor:
        made = self._parts()
        return made["base"].decode() + made["rest"].decode()

    def transposed(self) -> ResidualStorage:
        return ResidualStorage(**parts.joined(**{name: parts.transposed(part) for name, part in self._parts().items()}))


@dataclass(frozen=True)
class ResidualQuantizer(Quantizer):
    base: Quantizer
    rest: Quantizer

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        return super().from_options(**parts.read(cls, options))

    @cached_property
    def _sides(self) -> dict[str, Self]:
        return {"row": parts.side(self, "row"), "col": parts.side(self, "col")}

    @property
    def known_failures(self) -> dict[str, str]:
        if "nvfp4" not in self.base.text + self.rest.text:
            return {}
        return {"test_what_it_represents_stays": "scales that are rounded again may be others"}

    def side(self, direction: Direction) -> Quantizer:
        return self._sides[direction]

    @property
    def stats(self) -> tuple[Stat, ...]:
        return parts.named(base=self.base.stats)

    @property
    def uncut(self) -> tuple[int, ...]:
        return parts.uncut(self.base, later=[self.rest])

    @property
    def transposable(self) -> bool:
        return self.base.transposable and self.rest.transposable

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return parts.joined(base=parts.measure(self.base, x))

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        base = parts.encode(self.base, x, parts.taken("base", stats))
        rest = parts.encode(self.rest, x.float() - base.decode())
        return self.storage(**parts.joined(base=base.buffers(), rest=rest.buffers()))


register = Plugin(__name__, "residual", {"residual": "ResidualQuantizer ResidualStorage"}).register
