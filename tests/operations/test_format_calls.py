"""A format's results are checked at its first call, outside the kit too: in words, and once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.plugins import FormatPlugin
from torch import Tensor

import lpq
from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage
from lpq.formats.format import Direction
from lpq.operations import format_calls
from lpq.registry import PluginError


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
        scale = stats["amax"].clamp(min=1e-30) / 127
        return self.storage(**self.buffers((x / scale).round().to(torch.int8), scale))

    def buffers(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"data": data, "scale": scale}


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


class Halves(Storage):
    layout = (Buffer("data", torch.float16),)

    def decode(self) -> Tensor:
        return self.data.float()


@dataclass(frozen=True)
class KeepsHalves(Quantizer):
    """A matrix in fp16 is what it stores."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return self.storage(data=x.half())


@dataclass(frozen=True)
class MakesItsSides(Right):
    fine: bool = False

    def side(self, direction: Direction) -> Quantizer:
        return replace(self, fine=direction == "row")


def measures(change: Callable[[dict[str, Tensor], Tensor], object]) -> dict[str, Any]:
    return {"measure": lambda self, x: change(Right.measure(self, x), x)}


QUANTIZERS: dict[str, dict[str, Any]] = {
    "WrongDtype": {"buffers": lambda self, data, scale: {"data": data.short(), "scale": scale}},
    "WrongShape": {"buffers": lambda self, data, scale: {"data": data, "scale": scale.squeeze(1)}},
    "WrongName": {"buffers": lambda self, data, scale: {"data": data, "scales": scale}},
    "WrongDevice": {"buffers": lambda self, data, scale: {"data": data, "scale": scale.to("meta")}},
    "NoStorage": {"encode": lambda self, x, stats: {"data": x}},
    "ExtraStat": measures(lambda stats, x: stats | {"mean": x.mean()}),
    "NoStat": measures(lambda stats, x: {"max": x.amax()}),
    "DoubleStat": measures(lambda stats, x: {name: value.double() for name, value in stats.items()}),
    "FlatStat": measures(lambda stats, x: {name: value.squeeze(1) for name, value in stats.items()}),
    "StatAlone": measures(lambda stats, x: stats["amax"]),
    "RecallsNothing": {"state": (StateBuffer("last"),), "recall": lambda self, state: dict(state)},
    "RecallsOne": {"state": (StateBuffer("last"),), "recall": lambda self, state: state["last"]},
    "RecallsNone": {"state": (StateBuffer("last"),), "recall": lambda self, state: None},
    "NoStats": {"stats": Quantizer.stats},
    "OneStat": {"stats": Right.stats[0]},
}
"""Those that differ from what is right in one thing."""
STORAGES: dict[str, dict[str, Any]] = {
    "DecodesToBf16": {"decode": lambda self: Rows.decode(self).bfloat16()},
    "DecodesTheTranspose": {"decode": lambda self: Rows.decode(self).t()},
    "OneBuffer": {"layout": Rows.layout[0]},
    "MadeByAFunction": {"wrap": staticmethod(lambda *given: Rows.from_tensors(*given))},
    "MadeByItsFormerName": {"wrap": classmethod(lambda cls, *given: Rows.from_tensors(*given))},
}
for name, members in QUANTIZERS.items():
    globals()[name] = dataclass(frozen=True)(type(name, (Right,), {**members, "__module__": __name__}))
for name, members in STORAGES.items():
    globals()[name] = type(name, (Rows,), {**members, "__module__": __name__})
WRONG = [
    ("WrongDtype", "Rows", "WrongDtype.encode returned data as torch.int16; Rows.layout declares torch.int8, block"),
    ("WrongShape", "Rows", "scale of shape [16] for [16, 40]; Rows.layout declares torch.float32, block (1, None)"),
    (
        "WrongName",
        "Rows",
        "WrongName.encode set ['data', 'scales']; Rows.layout declares ['data', 'scale']. Remedy: ret",
    ),
    ("WrongDevice", "Rows", "returned scale on meta, of a matrix on cpu; Rows.layout declares torch.float32"),
    ("NoStorage", "Rows", "NoStorage.encode returned dict and no storage. Remedy: return Rows(data=…, scale=…)"),
    (
        "ExtraStat",
        "Rows",
        "ExtraStat.measure returned mean, which ExtraStat.stats does not declare. Remedy: declare it",
    ),
    ("NoStat", "Rows", "NoStat.measure returned no 'amax', which stats declares. Remedy: return a dict of all of them"),
    ("StatAlone", "Rows", "StatAlone.measure returned a Tensor and no dict. Remedy: return a dict of all of them, as"),
    (
        "DoubleStat",
        "Rows",
        "DoubleStat.measure returned amax as torch.float64; DoubleStat.stats declares torch.float32",
    ),
    ("FlatStat", "Rows", "amax of shape [16] for [16, 40]; FlatStat.stats declares torch.float32"),
    ("Right", "DecodesToBf16", "DecodesToBf16.decode returned torch.bfloat16; a decoded matrix is torch.float32"),
    ("Right", "DecodesTheTranspose", "DecodesTheTranspose.decode returned [40, 16] for a matrix [16, 40]. Remedy: cut"),
    ("RecallsNothing", "Rows", "RecallsNothing.recall returned no 'amax', which stats declares"),
    ("RecallsOne", "Rows", "RecallsOne.recall returned a Tensor and no dict. Remedy: return a dict of all of them, as"),
    ("RecallsNone", "Rows", "RecallsNone.recall returned a NoneType and no dict"),
    (
        "NoStats",
        "Rows",
        "NoStats.measure is never called, since stats declares nothing. Remedy: declare what it returns",
    ),
    ("OneStat", "Rows", "which is no tuple of Stat. Remedy: write a tuple, (Stat(…),), with a comma if it is one"),
    ("Right", "OneBuffer", "which is no tuple of Buffer. Remedy: write a tuple, (Buffer(…),), with a comma"),
    (
        "Right",
        "MadeByItsFormerName",
        "MadeByItsFormerName.wrap is never called, since it is from_tensors now. Remedy: ",
    ),
    ("Transposes", "Rows", "is declared transposable, and Rows has no transposed(). Remedy: define Rows.transposed"),
    ("Transposes", "TurnsTheDataOnly", "TurnsTheDataOnly.transposed returned scale of shape [16, 40] for [40, 16]"),
    ("MakesItsSides", "Rows", "MakesItsSides.side('row') makes a new quantizer whenever it is called. Remedy: make it"),
]


@pytest.fixture
def use(register: Callable[..., object]) -> Callable[..., None]:
    """Register a format, encode a matrix both ways, with what is remembered, and decode it."""

    def encode(quantizer: str, storage: str, rows: int = 16, anew: bool = True) -> None:
        if anew:
            register(FormatPlugin("returned", globals()[quantizer], globals()[storage]), name="returned")
        made = lpq.quantizer("returned")
        made.quantize(torch.randn(rows, 40), state=made.new_state() or None).dequantize()

    return encode


@pytest.mark.parametrize(("quantizer", "storage", "words"), WRONG, ids=[f"{q}, {s}" for q, s, _ in WRONG])
def test_what_is_returned_is_what_is_declared(
    use: Callable[..., None], quantizer: str, storage: str, words: str
) -> None:
    """The error names the plugin, the method and the buffer, what came and what is declared; at the second call too."""
    for anew in (True, False):
        with pytest.raises(PluginError) as raised:
            use(quantizer, storage, anew=anew)
        assert str(raised.value).startswith("plugin returned (registered in this process) cannot be used: returned")
        assert words in str(raised.value)


def test_it_is_looked_at_once(use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """No step costs more than a look into a set, until the plugins change: what is right then is looked at again."""
    looked: list[str] = []
    for name in ("unfit_storage", "unfit_stats", "unfit_matrix"):
        original = getattr(format_calls, name)
        monkeypatch.setattr(format_calls, name, lambda *args, f=original, name=name: (looked.append(name), f(*args))[1])
    for anew in (True, False, False):
        use("Right", "Rows", anew=anew)
    assert sorted(looked) == ["unfit_matrix", "unfit_stats", "unfit_storage"]
    with pytest.raises(PluginError, match=r"WrongDtype\.encode"):
        use("WrongDtype", "Rows")


def test_an_empty_matrix_says_nothing_of_others(use: Callable[..., None]) -> None:
    with pytest.raises(PluginError, match="returned scale of shape"):
        use("WrongShape", "Rows", rows=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_operand_has_memory_of_its_own(register: Callable[..., object], dtype: torch.dtype) -> None:
    """Also where ``encode`` had nothing to convert and returned the matrix: who writes to it changes no operand."""
    register(FormatPlugin("halves", KeepsHalves, Halves), name="halves")
    x = torch.randn(6, 40).to(dtype)
    tensor, expected = lpq.quantizer("halves").quantize(x), x.half().to(dtype, copy=True)
    x.fill_(torch.nan)
    for _, operand in tensor.operands:
        assert operand.tensors()[0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(tensor.dequantize(), expected)
