"""Statistics of a third party's format whose options do more than their names say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from support.plugins import FormatPlugin
from test_numerics import Take, batch, by_operand, ratio
from torch import Tensor, nn

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, RandomBits, Rotation, Stat, Storage
from lpq.formats.blocks import pad_blocks
from lpq.observe import observing


class TurnedStorage(Storage):
    layout = (Buffer("data", torch.int8, pad=4), Buffer("step", torch.float32, block=(None, None)))
    quantizer: TurnedQuantizer

    def decode_stored(self) -> Tensor:
        return self.data.float() * self.step * (2 if self.quantizer.turned else 1)


@dataclass(frozen=True)
class TurnedQuantizer(Quantizer):
    """A third party's format whose options do more than their names say: one that rotates stores steps of half the
    size, and one that rounds with random bits has wider steps, as these may lead beyond the largest element."""

    turned: bool = False
    stochastic: bool = False
    stats = (Stat("largest"),)

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(signs=(1, -1, 1, 1)) if self.turned else None

    def side(self, direction: Any) -> TurnedQuantizer:
        return self._unturned if direction == "row" else self

    @cached_property
    def _unturned(self) -> TurnedQuantizer:
        return replace(self, turned=False) if self.turned else self

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"largest": x.float().abs().amax()}

    def _encode(self, x: Tensor, stats: Mapping[str, Tensor], places: Any) -> Storage:
        step = self._step(stats["largest"])
        codes = (x.float() / step + places).floor().clamp(-127, 127).to(torch.int8)
        return TurnedStorage(data=pad_blocks(codes, (1, 4)), step=step / 2 if self.turned else step)

    def _step(self, largest: Tensor) -> Tensor:
        step = torch.where(largest > 0, largest / (40 if self.stochastic else 127), 1.0)
        return torch.exp2(step.log2().ceil())

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return self._encode(x, stats, 0.5)

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        return self._encode(x, stats, (bits.bytes(*x.shape).float() + 0.5) / 256)

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor:
        step = stats["largest"] / (40 if self.stochastic else 127)
        return (x / step + 0.5).floor() * step


def stored(quantizer: TurnedQuantizer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in the basis of the format, the values that are stored of it if no random bits round them, and the
    values that would be stored if no scale was rounded."""
    own = quantizer.rotated(x)
    stats = quantizer.measure(own)
    operand = quantizer.encode(own, stats).bind(quantizer, (x.shape[0], x.shape[1]), x.dtype)
    return own, operand.decode_rotated(), quantizer.unrounded(own, stats)


def test_no_other_quantizer_is_taken_for_the_one_that_runs() -> None:
    """Such as one whose options differ by one name."""
    registry.register(FormatPlugin("turned", TurnedQuantizer, TurnedStorage), name="turned")
    try:
        quantizer: Any = lpq.quantizer("turned(turned=true, stochastic=true)")
        recipe = f"x={quantizer}, w=turned(), dy={quantizer}"
        net, seen = lpq.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), recipe), Take()
        watch = lpq.observe.numerics(net, every=1)
        with watch.step(), observing(net, seen):
            net(batch(32)).square().sum().backward()
        readings = by_operand(watch.readings())
        for name in ("x", "dy"):
            matrix = seen[name].value
            for direction, decoded in zip(("row", "col"), seen[name].decoded(), strict=True):
                assert decoded is not None
                one = readings[f"0.{name}.{direction}"]
                assert one.snr_db == pytest.approx(ratio(matrix, decoded), abs=1e-3)
                own, nearest, exact = stored(quantizer.side(direction), matrix if direction == "row" else matrix.t())
                kept = nearest != 0
                by_scales = (nearest - own)[kept].square().sum() - (exact - own)[kept].square().sum()
                assert one.error_scale == pytest.approx(float(by_scales / (decoded - matrix).square().sum()), abs=1e-3)
                assert abs(one.error_scale or 0) > 0.01
    finally:
        registry.refresh()


class CutStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("step", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.step


@dataclass(frozen=True)
class CutQuantizer(Quantizer):
    """A third party's format that cuts what is far out in its row, by a statistic or by the elements themselves."""

    measured: bool = False

    @property
    def stats(self) -> tuple[Stat, ...]:
        return (Stat("mean", block=(1, None)),) if self.measured else ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": x.float().abs().mean(1, keepdim=True)} if self.measured else {}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        step = (stats["mean"] if self.measured else x.float().abs().mean(1, keepdim=True)) / 3
        return CutStorage(data=(x.float() / step).round().clamp(-7, 7).to(torch.int8), step=step)


def test_what_is_cut_is_not_known_where_scales_follow_from_the_elements() -> None:
    """Twice the matrix has other scales then, and shows none that is cut."""
    registry.register(FormatPlugin("cut", CutQuantizer, CutStorage), name="cut")
    try:
        x = batch(32)
        for measured in (True, False):
            net = lpq.convert(nn.Sequential(nn.Linear(64, 32)), f"cut(measured={measured})".lower())
            watch = lpq.observe.numerics(net, every=1)
            with watch.step():
                net(x).sum().backward()
            step = x.abs().mean(1, keepdim=True) / 3
            expected = pytest.approx(float((x.abs() > 7 * step).float().mean())) if measured else None
            assert by_operand(watch.readings())["0.x.row"].saturated == expected
            assert not measured or expected != pytest.approx(0)
    finally:
        registry.refresh()


@pytest.mark.parametrize("recipe", ["nvfp4-four-over-six", "nvfp4-eden"])
def test_what_is_cut_is_not_known_where_scales_are_searched_or_corrected(recipe: str) -> None:
    net = lpq.convert(nn.Sequential(nn.Linear(128, 64)), recipe)
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(torch.randn(64, 128)).square().sum().backward()
    one = by_operand(watch.readings())["0.x.row"]
    assert one.saturated is None
    assert one.flushed is not None
