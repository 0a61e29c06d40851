"""Patterns of others' files are matched by Python's ``re``, or refused in words where that would take long."""

from __future__ import annotations

import time

import pytest

from lpq.engines.patterns import WAYS, read_patterns
from lpq.registry import LayoutError


@pytest.mark.parametrize(
    "pattern",
    [
        ".*", "lm_head", r"model\.layers\.\d+\.mlp\..*", ".*(q|k|v|o)_proj$", r"^(?!.*self_attn).*$", r".*(?<!q)_proj",
        r"(?:.*\.)?layers\.(0|1|2|31)\.mlp\.(gate|up|down)_proj", r".*\.experts\.\d+\.(gate|up)_proj", "(?i:LM)_head",
    ],
)  # fmt: skip
def test_patterns_as_others_write_them_are_read(pattern: str) -> None:
    assert [read.pattern for read in read_patterns([pattern])] == [pattern]


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z_0-9.]+)+!", "(a|a)*!", "(a*)*!", "((a+)+)+!", "(?:a?){30}a{30}!", "(.*)(.*)(.*)(.*)(.*)(.*)!",
        "(a|a)" * 40, "a?" * 40 + "a" * 40, "(?=(?=.*.*.*).*.*)!",
    ],
)  # fmt: skip
def test_what_would_take_long_is_refused(pattern: str) -> None:
    """An exponential number of ways, or a high power of the length of a name."""
    with pytest.raises(LayoutError, match=r"it repeats more than one character|which would take long"):
        read_patterns([pattern])


@pytest.mark.parametrize("pattern", ["(.*)(.*)(.*)(.*)!", "a{4294967294}", "(?=.*.*).*.*!"])
def test_no_pattern_takes_long(pattern: str) -> None:
    (compiled,), before = read_patterns([pattern]), time.process_time()
    assert compiled.match("a" * 60) is None
    assert time.process_time() - before < 1


def test_patterns_that_would_take_long_together_are_refused() -> None:
    each = "(.*)(.*)(.*)(.*)!"  # a hundred and one places to the power of four
    count = WAYS // 101**4
    assert len(read_patterns([each] * count)) == count
    with pytest.raises(
        LayoutError, match="too many ways to match it, with the patterns before it, which would take long"
    ):
        read_patterns([each] * (count + 1))


def test_thousands_of_patterns_take_little_time() -> None:
    """Beyond the time in which ``re`` reads them."""
    patterns = read_patterns(rf"model\.layers\.{i}\.mlp\.(up|down)_proj" for i in range(3000))
    before = time.process_time()
    for name in (f"model.layers.{i}.self_attn.{n}_proj" for i in range(25) for n in "qkvo"):
        assert not any(pattern.match(name) for pattern in patterns)
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("[", "unterminated character set"), (r"(a)\1", "it has GROUPREF"), ("(?>a)", "it has ATOMIC_GROUP"),
        ("(?<=a*)b", "look-behind requires fixed-width pattern"),
        ("a" * 1001, "it has 1001 characters"), ("(" * 900 + ")" * 900, "it has 1800 characters"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(LayoutError, match=rf"is no pattern of layers that lpq reads: {words}"):
        read_patterns([pattern])
