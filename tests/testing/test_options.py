"""Which quantizers the kit tests: all that a format's options make, or enough that every two values meet."""

from __future__ import annotations

import itertools

import broken_formats as broken
import pytest

import lpq
from lpq import registry
from lpq.core import Quantizer
from lpq.registry.errors import OptionError
from lpq.testing.options import ALL, family, partners


def texts_of(quantizer: type[Quantizer]) -> list[str]:
    """The quantizers that the kit tests of a format."""
    registry.register(broken.Plugin(quantizer), name="broken")
    try:
        return [str(q) for q in family("broken").quantizers]
    finally:
        registry.refresh()


def test_all_combinations_of_few_options() -> None:
    assert texts_of(broken.Modes) == ["broken", "broken(mode=b)", "broken(wide=true)", "broken(wide=true, mode=b)"]


def test_the_default_comes_first() -> None:
    for name in ("fp8", "mxfp8", "nvfp4", "identity"):
        assert str(family(name).default) == name


def test_pairs_of_many_options() -> None:
    """fp8 has some ninety-six combinations; fewer cover all pairs of values."""
    quantizers = family("fp8").quantizers
    assert ALL < len(quantizers) < 24
    options = {"scaling": 4, "dtype": 2, "pow2": 3, "block": 2, "algo": 2}
    for (a, count_a), (b, count_b) in itertools.combinations(options.items(), 2):
        met = {(getattr(q, a), getattr(q, b)) for q in quantizers}
        assert len(met) == count_a * count_b, f"not all values of {a} and {b} meet"


def test_parentheses_mean_one_quantizer() -> None:
    assert family("nvfp4()").quantizers == (lpq.quantizer("nvfp4"),)
    assert family("nvfp4(block=16x16)").quantizers == (lpq.quantizer("nvfp4(block=16x16)"),)


def test_a_quantizer_as_an_option_is_every_other_format() -> None:
    hybrids = family("hybrid").quantizers
    others = {"fp8", "mxfp8", "nvfp4", "identity"}
    assert others <= set(partners())
    assert {(str(q.row), str(q.col)) for q in hybrids} >= set(itertools.product(others, others))
    assert {q.col_source for q in hybrids} == {"original", "row"}


def test_an_option_without_values_is_asked_for() -> None:
    """In words for ``lpq check`` and for pytest alike."""
    with pytest.raises(OptionError, match=r"name the quantizer in full, as 'broken\(levels=…\)'$"):
        texts_of(broken.Levels)


def test_options_that_do_not_go_together_are_left_out() -> None:
    assert texts_of(broken.Picky) == ["broken", "broken(mode=b)", "broken(wide=true)"]
