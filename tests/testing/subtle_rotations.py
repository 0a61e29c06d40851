"""INT8 in a rotated basis, which an option changes; some forget to say so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from broken_formats import Int8, Stats, found_by, stored
from torch import Tensor

from lpq.core import Buffer, Storage

PRODUCTS = "test_products_are_those_of_decoded_operands"


def turned(x: Tensor, flip: bool, *, back: bool = False) -> Tensor:
    """Pairs of columns, turned by 45 degrees; with ``flip`` after the sign of every second column."""
    pairs = torch.nn.functional.pad(x.float(), (0, x.shape[1] % 2)).unflatten(1, (-1, 2))
    signs = torch.tensor([1.0, -1.0 if flip else 1.0])
    first, second = (pairs if back else pairs * signs).unbind(2)
    made = torch.stack([first + second, first - second], 2) / 2**0.5
    return (made * signs if back else made).flatten(1)


class PairsStorage(Storage):
    layout = (Buffer("data", torch.int8, pad=2), Buffer("scale", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return turned(self.decode_rotated(), self.quantizer.flip, back=True)[:, : self.shape[1]]

    def decode_rotated(self) -> Tensor:
        return self.data.float() * self.scale


@stored(PairsStorage)
@dataclass(frozen=True)
class Pairs(Int8):
    """INT8 of pairs of columns that are turned; an option turns them otherwise."""

    flip: bool = False
    rotation = "pairs"

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(turned(x, self.flip))

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(turned(x, self.flip), stats)


class NamesEachTurn(Pairs):
    """It has a name for each of its bases, and says that no other option changes one."""

    rotation_options = ()

    @property
    def rotation(self) -> str:  # type: ignore[override]
        return "flipped" if self.flip else "pairs"


class NamesTheOption(Pairs):
    rotation_options = ("flip",)


@found_by(PRODUCTS, "(flip=true) is off by *: let rotation_options name each option that changes")
class ForgetsTheOption(Pairs):
    """Says that no option changes its rotation."""

    rotation_options = ()


class MisspellsTheOption(Pairs):
    rotation_options = ("flop",)


class SignedStorage(PairsStorage):
    def decode(self) -> Tensor:
        return super().decode() * (-1) ** self.quantizer.steps


@found_by(PRODUCTS, "(steps=2) is off by 2.*: let rotation_options name each option that changes it")
@stored(SignedStorage)
@dataclass(frozen=True)
class Signed(Pairs):
    """Changes all signs where an option is odd, which is a number."""

    steps: int = 1
    rotation_options = ("flip",)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(x * (-1) ** self.steps)

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x * (-1) ** self.steps, stats)
