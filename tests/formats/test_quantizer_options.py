"""Options: a quantizer has one text, by which everybody knows it, and is told apart by its options alone."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.plugins import FormatPlugin
from torch import float32

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Storage
from lpq.registry.errors import OptionError, PluginError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
import broken_formats as broken


class AcmeStorage(Storage):
    layout = (Buffer("data", float32),)


@dataclass(frozen=True)
class AcmeQuantizer(Quantizer):
    """A format with numbers for options, of which one has a whole number for its default."""

    alpha: float = 0.5
    limit: float | None = None
    either: int | float = 2
    steps: int = 1


@pytest.fixture(autouse=True)
def acme(register: Callable[..., object]) -> None:
    register(FormatPlugin("acme", AcmeQuantizer, AcmeStorage), name="acme")


@pytest.mark.parametrize(
    ("first", "second", "text"), [
        ({"alpha": 3}, {"alpha": 3.0}, "acme(alpha=3.0)"), ({"alpha": -0.0}, {"alpha": 0}, "acme(alpha=0.0)"),
        ({"limit": 7}, {"limit": 7.0}, "acme(limit=7.0)"), ({"either": 1}, {"either": 1.0}, "acme(either=1.0)"),
        ({}, {"either": 2.0, "limit": None, "alpha": 0.5}, "acme"),
        ({"alpha": math.inf, "steps": 3}, {"steps": 3, "alpha": math.inf}, "acme(alpha=inf, steps=3)"),
    ], ids=str
)  # fmt: skip
def test_numbers_that_are_equal_are_one_text(first: dict[str, float], second: dict[str, float], text: str) -> None:
    for one, other in ((first, second), (second, first)):
        registry.refresh()
        registry.register(FormatPlugin("acme", AcmeQuantizer, AcmeStorage), name="acme")
        assert AcmeQuantizer(**one) == AcmeQuantizer(**other)
        written = ", ".join(f"{name}={'none' if value is None else value}" for name, value in one.items())
        assert lpq.quantizer(f"acme({written})").text == text
        assert lpq.quantizer("acme", **one).text == lpq.quantizer("acme", **other).text == text
        assert replace(AcmeQuantizer(), **one).text == text
        assert lpq.quantizer(text) == AcmeQuantizer(**one)


def test_whole_numbers_and_truths_stay_what_they_are() -> None:
    assert type(AcmeQuantizer(steps=3).steps) is int
    for wrong in ({"steps": 3.0}, {"alpha": True}, {"alpha": "3"}, {"alpha": 10**400}):
        with pytest.raises(OptionError, match=r"AcmeQuantizer: option '(steps|alpha)' must be a"):
            AcmeQuantizer(**wrong)


def test_annotations_that_cannot_be_read_are_said_to_be_so() -> None:
    @dataclass(frozen=True)
    class Unreadable(Quantizer):
        kind: OfNoModule = None  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(OptionError, match="Unreadable cannot be read: name 'OfNoModule' is not defined"):
        Unreadable()


@pytest.mark.parametrize(
    ("quantizer", "words"),
    [
        (broken.LeavesOneOut, "LeavesOneOut, is equal to one with another half. Remedy: let the dataclass make __eq__"),
        (broken.IsItself, "IsItself, is not equal to a copy of itself"),
        (broken.ComparesLetters, "ComparesLetters, compares by more than its options: == raised AttributeError"),
    ],
)
def test_a_format_that_tells_options_apart_wrongly_is_refused(quantizer: type[Quantizer], words: str) -> None:
    registry.register(broken.Plugin(quantizer), name="broken")
    with pytest.raises(PluginError, match=words):
        lpq.quantizer("broken")


def test_a_value_whose_equality_misleads_is_refused() -> None:
    registry.register(broken.Plugin(broken.TakesWords), name="broken")
    right = lpq.quantizer("broken(mode=b)")
    for options, given in (({"mode": broken.Word("c")}, "'c'"), ({"step": float("nan")}, "nan")):
        words = rf"is {given}; by options quantizers are told apart, so it must be true or"
        with pytest.raises(OptionError, match=words):
            dataclasses.replace(right, **options)
    assert dataclasses.replace(right, mode="c") != right


def test_what_a_format_declares_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[object] = []
    monkeypatch.setattr("lpq.formats.format.check_side", lambda quantizer, side, *_: sides.append(side))
    new = lpq.quantizer("acme(steps=17)")
    assert len(sides) == 2  # one for each direction
    for same in (new, lpq.quantizer("acme(steps=17)")):
        same.ready()
    assert len(sides) == 2
