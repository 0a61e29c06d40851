"""Sentences in docstrings, comments and messages name their nouns."""

from __future__ import annotations

import io
import re
import tokenize

import pytest
from test_house import files, found_in

HABITS = re.compile(r"(?:that|those) of\b|(?<![^.:] )(?:Of|What|Who|Whose|Whoever|Whatever) [a-z]")
"""``that of`` in place of the noun, and sentences that begin with a part of one."""


def habits(source: str) -> list[str]:
    """The beginnings of such sentences in docstrings, comments and messages."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = " ".join(token.string.lstrip("rf").strip("\"'# ").split())
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and not text.startswith("What runs on {")):
            found += [text[match.start() :][:60] for match in HABITS.finditer(text)]
    return found


def test_sentences_name_their_nouns() -> None:
    assert found_in(files("lpq/**/*.py", "plugins/**/*.py"), lambda path: habits(path.read_text())) == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of two operands the first."""', ["Of two operands the first."]),
        ('def f():\n    """Encode it. What is left stays."""', ["What is left stays."]),
        ('raise ValueError("its scales are those of another")', ["those of another"]),
        ("x = 1  # that of the whole", ["that of the whole"]),
        ('"""Where it lies. The words Who and Of are no beginning; What that means."""', []),
        ("those = of = Of(a)", []),
    ],
)
def test_a_sentence_without_its_noun_is_noticed(source: str, found: list[str]) -> None:
    assert habits(source) == found
