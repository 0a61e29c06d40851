"""Patterns of others' files match what Python's ``re`` matches, in time that is known beforehand."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpq.engines.patterns import Patterns
from lpq.registry import LayoutError

ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\W", "[ab]", "[^a]", "[0-9_]", "^", "$", "(?!a)", "(?=.*b)"])
REPEATS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(inner, REPEATS).map(lambda both: f"(?:{both[0]}){both[1]}"),
    ),
    max_leaves=6,
)
NAMES = st.text("ab.0_\n", max_size=9)


@given(PATTERNS, NAMES)
def test_it_matches_what_re_matches(pattern: str, name: str) -> None:
    assert Patterns([pattern]).match(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z_0-9.]+)+!",
        "(a|a)*!",
        "(a*)*!",
        "(.*)(.*)(.*)(.*)(.*)(.*)!",
        "((a+)+)+!",
        "(?:a?){30}a{30}!",
        "a{4294967294}",
    ],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    before = time.process_time()
    assert not Patterns([pattern]).match("a" * 40)
    assert time.process_time() - before < 1


def test_thousands_of_patterns_take_little_time() -> None:
    """Beyond the time in which ``re`` parses them."""
    patterns = Patterns(rf"model\.layers\.{i}\.mlp\.(up|down)_proj" for i in range(3000))
    before = time.process_time()
    assert patterns.match("model.layers.2999.mlp.down_proj")
    assert not any(patterns.match(f"model.layers.{i}.self_attn.{n}_proj") for i in range(25) for n in "qkvo")
    assert time.process_time() - before < 1


def test_what_would_take_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpq.engines.patterns.STEPS", 10_000)
    patterns = Patterns(["(?:[ab]" + "c?" * 300 + ")*!"])
    with pytest.raises(LayoutError, match="matching its patterns with the names of layers takes too long"):
        any(patterns.match("ab" * 50) for _ in range(100))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("[", "unterminated character set"), (r"(a)\1", "it has GROUPREF"), ("(?i)a", "it has flags"),
        ("(?i:a)", "it has SUBPATTERN"), ("(?<=a)b", "it has ASSERT"), (r"\bx", "it has AT AT_BOUNDARY"),
        ("a" * 1001, "it has 1001 characters"), ("(" * 900 + ")" * 900, "it has 1800 characters"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(LayoutError, match=rf"is no pattern of layers that lpq reads: {words}"):
        Patterns([pattern])
