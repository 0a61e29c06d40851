"""INT8 in a rotated basis, which an option changes; some rotate twice, or declare it in a way that says too little."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from broken_formats import Int8, Stats, found_by, stored
from torch import Tensor

import lpq
from lpq.core import Buffer, Quantizer, Rotation, Storage
from lpq.formats.blocks import pad_blocks


class PairsStorage(Storage):
    layout = (Buffer("data", torch.int8, pad=2), Buffer("scale", torch.float32, block=(1, None)))

    def decode_stored(self) -> Tensor:
        return self.data.float() * self.scale


@stored(PairsStorage)
@dataclass(frozen=True)
class Pairs(Int8):
    """INT8 of pairs of columns that are turned by 45 degrees; with ``flip`` after the sign of every second column."""

    flip: bool = False

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(signs=(1, -1 if self.flip else 1))


class TriplesStorage(PairsStorage):
    layout = (Buffer("data", torch.int8, pad=3), Buffer("scale", torch.float32, block=(1, None)))


@stored(TriplesStorage)
class Triples(Pairs):
    """Three columns are mixed, by a matrix, or by another one."""

    @property
    def rotation(self) -> Rotation | None:
        third = 2 / 3
        rows = (1 - third, -third, -third), (-third, 1 - third, -third), (-third, -third, 1 - third)
        return Rotation(matrix=rows[::-1] if self.flip else rows)


class SixteensStorage(PairsStorage):
    layout = (Buffer("data", torch.int8, pad=16), Buffer("scale", torch.float32, block=(1, None)))


@stored(SixteensStorage)
@dataclass(frozen=True)
class Sixteens(Int8):
    """A plain Hadamard transform of 16, or NVFP4's."""

    signed: bool = False

    @property
    def rotation(self) -> Rotation | None:
        return lpq.quantizer("nvfp4(rht=true)").rotation if self.signed else Rotation(signs=(1,) * 16)


@stored(PairsStorage)
@dataclass(frozen=True)
class MayTurn(Int8):
    """Pairs of columns are turned unless an option leaves them as they are."""

    turned: bool = True

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(signs=(1, 1)) if self.turned else None

    @property
    def without_rotation(self) -> Quantizer | None:  # type: ignore[override]
        return replace(self, turned=False) if self.turned else None

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return pad_blocks(super().codes(x, scale), (1, 2))


class MayTurnAndDoubleStorage(PairsStorage):
    quantizer: MayTurn

    def decode_stored(self) -> Tensor:
        return super().decode_stored() * (2 if self.quantizer.turned else 1)


@stored(MayTurnAndDoubleStorage)
@found_by("test_a_quantizer_without_rotation_decodes_what_is_stored", "over the buffers of *: * elements differ")
class MayTurnAndDouble(MayTurn):
    """Stores half of what is turned, and says that it does not."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x / 2 if self.turned else x, stats)


@found_by("test_values_come_back", "has the relative error")
class RotatesItself(Pairs):
    """Rotates what it gets, which is rotated."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(Rotation(signs=(1, 1)).apply(x), stats)


class AnyRotation(Rotation):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rotation)

    def __hash__(self) -> int:
        return 0


@found_by("test_products_are_those_of_decoded_operands", "(flip=true) is off by *: the values that dec")
class EqualsAny(Pairs):
    """Its rotation says that it is any other one."""

    @property
    def rotation(self) -> Rotation | None:
        return AnyRotation(signs=(1, -1 if self.flip else 1))


class NamesItsRotation(Pairs):
    rotation = "pairs"  # type: ignore[assignment]


class NamesOptions(Pairs):
    rotation_options = ("flip",)


class DecodesBothStorage(PairsStorage):
    def decode_rotated(self) -> Tensor:
        return self.decode_stored()


@stored(DecodesBothStorage)
class DecodesBoth(Pairs):
    pass


class UndoesStorage(PairsStorage):
    def decode(self) -> Tensor:
        return self.decode_stored()


@stored(UndoesStorage)
class Undoes(Pairs):
    pass


class CutsPairsStorage(PairsStorage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))


@stored(CutsPairsStorage)
class CutsPairs(Pairs):
    pass


class Changes(Pairs):
    @property
    def rotation(self) -> Rotation | None:
        return Rotation(signs=tuple(int(sign) for sign in torch.randint(2, (64,)) * 2 - 1))


class KeepsNoTurnStorage(PairsStorage):
    layout = (Buffer("data", torch.int8, pad=32), Buffer("scale", torch.float32, block=(1, None)))


@stored(KeepsNoTurnStorage)
class KeepsNoTurn(Pairs):
    rotation = Rotation(drawn=32)  # type: ignore[assignment]


REFUSED = {
    NamesItsRotation: "has rotation='pairs': a name tells no rotations apart. Remedy: let NamesItsRotation.rotation",
    NamesOptions: "has rotation_options, which plugin interface 2 does without: a * Remedy: take rotation_options away",
    DecodesBoth: "defines decode_rotated, which is the core's since plugin interface 2. Remedy: define decode_stored(s",
    Undoes: "is rotated, and UndoesStorage has no decode_stored(self), or a decode(self) of its own",
    CutsPairs: "mixes 2 columns, and every buffer of CutsPairsStorage may be cut between them. Remedy: declare pad=2",
    Changes: "Changes.rotation is another one whenever it is called",
    KeepsNoTurn: "of 32 after signs that each pass draws, and KeepsNoTurnStorage keeps no 'turn'. Remedy: be stoch",
}
