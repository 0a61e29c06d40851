"""Patterns: what they match, and when one is sure to match all that another does."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpq.recipes.globs import covers, matches

NAMES = ["".join(letters) for length in range(6) for letters in product("ab.", repeat=length)]
PATTERNS = st.lists(st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]"]), max_size=5).map("".join)


def test_a_star_goes_through_dots() -> None:
    assert matches("layers.*", "layers.0.mlp.up")
    assert matches("*", "")
    assert matches("layers.[01].*", "layers.1.up")
    assert not matches("layers", "layers.0")
    assert not matches("Layers.*", "layers.0")


@given(PATTERNS, PATTERNS)
def test_covering_is_never_claimed_wrongly(a: str, b: str) -> None:
    if covers(a, b):
        assert all(matches(a, name) for name in NAMES if matches(b, name))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("*", "lm_head"), ("*", "*"), ("*", ""), ("layers.*", "layers.0.*"), ("*.mlp.*", "layers.*.mlp.up"),
        ("*head", "lm_head"), ("layers.?.up", "layers.[01].up"), ("layers.[01].up", "layers.1.up"),
        ("a**", "a*"), ("*a*", "*ba*"), ("lm_head", "lm_head"), ("[!a]", "b"), ("a[", "a["),
    ],
)  # fmt: skip
def test_covering_is_seen(a: str, b: str) -> None:
    assert covers(a, b)


@pytest.mark.parametrize(
    ("a", "b"), [
        ("lm_head", "*"), ("?", "*"), ("layers.0.*", "layers.*"), ("[ab]", "?"), ("a*", "*a"), ("", "a"), ("a", ""),
    ]
)  # fmt: skip
def test_not_covering_is_seen(a: str, b: str) -> None:
    assert not covers(a, b)
