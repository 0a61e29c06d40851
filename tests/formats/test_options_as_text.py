"""Options: what equals another quantizer has its text, by which everybody knows it, however it was written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from torch import float32

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Storage
from lpq.registry import FormatSpec
from lpq.registry.errors import OptionError


class AcmeStorage(Storage):
    layout = (Buffer("data", float32),)


@dataclass(frozen=True)
class AcmeQuantizer(Quantizer):
    """A format with numbers for options, of which one has a whole number for its default."""

    alpha: float = 0.5
    limit: float | None = None
    either: int | float = 2
    steps: int = 1


class Acme:
    @staticmethod
    @registry.hookimpl
    def lpq_register_formats() -> FormatSpec:
        quantizer, storage = (f"{__name__}:{c.__name__}" for c in (AcmeQuantizer, AcmeStorage))
        return FormatSpec(name="acme", summary="for this test", quantizer=quantizer, storage=storage, effective_bits=32)


@pytest.fixture(autouse=True)
def _acme() -> Iterator[None]:
    registry.register(Acme(), name="acme")
    yield
    registry.refresh()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"alpha": 3}, {"alpha": 3.0}, "acme(alpha=3.0)"),
        ({"alpha": -0.0}, {"alpha": 0}, "acme(alpha=0.0)"),
        ({"limit": 7}, {"limit": 7.0}, "acme(limit=7.0)"),
        ({"either": 1}, {"either": 1.0}, "acme(either=1.0)"),
        ({}, {"either": 2.0, "limit": None, "alpha": 0.5}, "acme"),
        ({"alpha": math.inf, "steps": 3}, {"steps": 3, "alpha": math.inf}, "acme(alpha=inf, steps=3)"),
    ],
    ids=str,
)
def test_numbers_that_are_equal_are_one_text(first: dict[str, float], second: dict[str, float], text: str) -> None:
    for one, other in ((first, second), (second, first)):
        registry.refresh()
        registry.register(Acme(), name="acme")
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
