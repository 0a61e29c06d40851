"""Quantizers are told apart by their options: what is kept for one must never be taken for another."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lpq
from lpq import registry
from lpq.core import Quantizer
from lpq.registry.errors import OptionError, PluginError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
import broken_formats as broken


@pytest.fixture(autouse=True)
def refreshed() -> Iterator[None]:
    yield
    registry.refresh()


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
        with pytest.raises(
            OptionError, match=rf"is {given}; by options quantizers are told apart, so it must be true or false"
        ):
            dataclasses.replace(right, **options)
    assert dataclasses.replace(right, mode="c") != right
