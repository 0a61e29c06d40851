"""A format's results are checked at its first call, outside the kit too: in words, and once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage
from lpq.formats.format import Direction
from lpq.operations import format_calls
from lpq.registry import FormatSpec, PluginError, hookimpl


class Rows(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


@dataclass(frozen=True)
class Right(Quantizer):
    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return self.storage(**self.buffers((x / scale).round().to(torch.int8), scale))

    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data, "scale": scale}


class WrongDtype(Right):
    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data.short(), "scale": scale}


class WrongShape(Right):
    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data, "scale": scale.squeeze(1)}


class WrongName(Right):
    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data, "scales": scale}


class WrongDevice(Right):
    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data, "scale": scale.to("meta")}


class NoStorage(Right):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Any:
        return self.buffers(x, x)


class ExtraStat(Right):
    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(x) | {"mean": x.mean()}


class NoStat(Right):
    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"max": x.amax()}


class DoubleStat(Right):
    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {name: value.double() for name, value in super().measure(x).items()}


class FlatStat(Right):
    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {name: value.squeeze(1) for name, value in super().measure(x).items()}


class DecodesToBf16(Rows):
    def decode(self) -> Tensor:
        return super().decode().bfloat16()


class DecodesTheTranspose(Rows):
    def decode(self) -> Tensor:
        return super().decode().t()


@dataclass(frozen=True)
class RecallsNothing(Right):
    state = (StateBuffer("last"),)

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)


class TurnsTheDataOnly(Rows):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, 1)))

    def transposed(self) -> Storage:
        return type(self)(data=self.data.t(), scale=self.scale)


@dataclass(frozen=True)
class Transposes(Right):
    stats = ()
    transposable = True

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = x.float().abs().clamp(min=1e-12)
        return self.storage(data=(x / scale).to(torch.int8), scale=scale)


@dataclass(frozen=True)
class NoStats(Right):
    stats = Quantizer.stats


@dataclass(frozen=True)
class MakesItsSides(Right):
    fine: bool = False

    def side(self, direction: Direction) -> Quantizer:
        return replace(self, fine=direction == "row")


@dataclass(frozen=True)
class OneStat(Right):
    stats = Right.stats[0]  # type: ignore[assignment]


class OneBuffer(Rows):
    layout = Rows.layout[0]  # type: ignore[assignment]


WRONG: list[tuple[type[Quantizer], type[Storage], str]] = [
    (WrongDtype, Rows, "WrongDtype.encode returned data as torch.int16; Rows.layout declares torch.int8, block"),
    (WrongShape, Rows, "scale of shape [16] for [16, 40]; Rows.layout declares torch.float32, block (1, None)"),
    (WrongName, Rows, "WrongName.encode set ['data', 'scales']; Rows.layout declares ['data', 'scale']. Remedy: ret"),
    (WrongDevice, Rows, "returned scale on meta, of a matrix on cpu; Rows.layout declares torch.float32"),
    (NoStorage, Rows, "NoStorage.encode returned dict and no storage. Remedy: return Rows(data=…, scale=…)"),
    (ExtraStat, Rows, "ExtraStat.measure returned mean, which ExtraStat.stats does not declare. Remedy: declare it"),
    (NoStat, Rows, "NoStat.measure returned no 'amax', which stats declares. Remedy: return a dict of all of them"),
    (DoubleStat, Rows, "DoubleStat.measure returned amax as torch.float64; DoubleStat.stats declares torch.float32"),
    (FlatStat, Rows, "amax of shape [16] for [16, 40]; FlatStat.stats declares torch.float32"),
    (Right, DecodesToBf16, "DecodesToBf16.decode returned torch.bfloat16; a decoded matrix is torch.float32"),
    (Right, DecodesTheTranspose, "DecodesTheTranspose.decode returned [40, 16] for a matrix [16, 40]. Remedy: cut off"),
    (RecallsNothing, Rows, "RecallsNothing.recall returned no 'amax', which stats declares"),
    (NoStats, Rows, "NoStats.measure is never called, since stats declares nothing. Remedy: declare what it returns"),
    (OneStat, Rows, "which is no tuple of Stat. Remedy: write a tuple, (Stat(…),), with a comma if it is one"),
    (Right, OneBuffer, "which is no tuple of Buffer. Remedy: write a tuple, (Buffer(…),), with a comma"),
    (Transposes, Rows, "is declared transposable, and Rows has no transposed(). Remedy: define Rows.transposed"),
    (Transposes, TurnsTheDataOnly, "TurnsTheDataOnly.transposed returned scale of shape [16, 40] for [40, 16]"),
    (MakesItsSides, Rows, "MakesItsSides.side('row') makes a new quantizer whenever it is called. Remedy: make it"),
]  # fmt: skip


class Plugin:
    def __init__(self, quantizer: type[Quantizer], storage: type[Storage]) -> None:
        self.quantizer, self.storage = (f"{cls.__module__}:{cls.__name__}" for cls in (quantizer, storage))

    @hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return FormatSpec(
            name="returned", summary="", quantizer=self.quantizer, storage=self.storage, effective_bits=None
        )


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    yield
    registry.refresh()


def use(quantizer: type[Quantizer], storage: type[Storage], rows: int = 16) -> None:
    """Encode a matrix both ways, with what is remembered, and decode it."""
    made = lpq.quantizer("returned")
    made.quantize(torch.randn(rows, 40), state=made.new_state() or None).dequantize()


@pytest.mark.parametrize(("quantizer", "storage", "words"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_returned_is_what_is_declared(quantizer: type[Quantizer], storage: type[Storage], words: str) -> None:
    """The error names the plugin, the method and the buffer, what came and what is declared; at the second call too."""
    registry.register(Plugin(quantizer, storage), name="returned")
    for _ in range(2):
        with pytest.raises(PluginError) as raised:
            use(quantizer, storage)
        assert str(raised.value).startswith("plugin returned (registered in this process) cannot be used: returned")
        assert words in str(raised.value)


def test_it_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step costs more than a look into a set, until the plugins change: what is right then is looked at again."""
    looked: list[str] = []
    for name in ("_unfit_storage", "_unfit_stats", "_unfit_matrix"):
        original = getattr(format_calls, name)
        monkeypatch.setattr(format_calls, name, lambda *args, f=original, name=name: (looked.append(name), f(*args))[1])
    registry.register(Plugin(Right, Rows), name="returned")
    for _ in range(3):
        use(Right, Rows)
    assert sorted(looked) == ["_unfit_matrix", "_unfit_stats", "_unfit_storage"]
    registry.register(Plugin(WrongDtype, Rows), name="returned")
    with pytest.raises(PluginError, match=r"WrongDtype\.encode"):
        use(WrongDtype, Rows)


def test_an_empty_matrix_says_nothing_of_others() -> None:
    registry.register(Plugin(WrongShape, Rows), name="returned")
    with pytest.raises(PluginError, match="returned scale of shape"):
        use(WrongShape, Rows, rows=0)
