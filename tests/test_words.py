"""Sentences in docstrings, comments and messages name their nouns."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest
from test_house import files, found_in, parsed

PRONOUNS = r"\b(?:[Tt]hat|[Tt]hose) of\b|\b[Ss]o many\b"
"""``that of`` in place of the noun, and ``so many`` in place of the parameter."""
BEGINNINGS = "(?:Of|What|Who|Whose|Whoever|Whatever) [a-z`]"
HABITS = re.compile(rf"{PRONOUNS}|(?<![^.:] ){BEGINNINGS}")
"""These, and sentences that begin with a part of one."""
IN_TEXTS = re.compile(rf"{PRONOUNS}|(?:^|[.:] |// ){BEGINNINGS}", re.MULTILINE)
"""The same where lines are no strings: in pages, and in comments of kernels."""


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


def test_pages_and_comments_of_kernels_name_their_nouns() -> None:
    texts = files("csrc/**/*.cu", "csrc/**/*.cuh", "csrc/**/*.c", "docs/**/*.md", "*.md")
    assert len(texts) > 100
    assert found_in(texts, lambda path: IN_TEXTS.findall(path.read_text())) == {}
    assert IN_TEXTS.findall("    // Those of column j, for so many rows.") == ["Those of", "so many"]
    assert IN_TEXTS.findall("## What it is\nA result. What it finds") == [". What i"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of two operands the first."""', ["Of two operands the first."]),
        ('def f():\n    """Encode it. What is left stays."""', ["What is left stays."]),
        ('raise ValueError("its scales are those of another")', ["those of another"]),
        ("x = 1  # that of the whole", ["that of the whole"]),
        ('"""A matrix of so many rows."""', ["so many rows."]),
        ('"""Where it lies. The words Who and Of are no beginning; What that means."""', []),
        ("those = of = Of(a)", []),
    ],
)
def test_a_sentence_without_its_noun_is_noticed(source: str, found: list[str]) -> None:
    assert habits(source) == found


FORMER = {
    "Saved", "Remembering", "Whole", "Way", "Spread", "as_it_is", "as_it_was", "stretches", "turned", "unbound",
    "saying",
}  # fmt: skip
"""Names that leave a reader to guess what they name."""
FUNCTIONS = {"wrap", "over"}
"""Such names of functions. A variable ``over`` is the ranks over which something lies."""
FILES = {"standing.py", "left_out.py", "grouping.py"}


def former_names(source: str) -> list[str]:
    """The definitions that have such a name, without names of earlier versions, which warn."""
    found: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef) and "former(" not in ast.unparse(node.body[-1]):
            found += {node.name} & (FORMER | FUNCTIONS)
        elif isinstance(node, ast.ClassDef):
            found += {node.name} & FORMER
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not ast.unparse(node.value or node).startswith("former("):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += {name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)} & FORMER
    return sorted(found)


def test_names_say_what_they_name() -> None:
    modules = files("lpq/**/*.py", "plugins/**/*.py")
    assert found_in(modules, lambda path: former_names(path.read_text())) == {}
    assert [path.name for path in modules if path.name in FILES] == []


def test_a_name_that_says_nothing_is_noticed() -> None:
    source = "class Way:\n    turned: bool\n    def over(self):\n        over = self.turned"
    assert former_names(source) == ["Way", "over", "turned"]
    assert former_names("x, unbound = 1, 2") == ["unbound"]
    assert former_names("unbound = former('unbound', cached_by_shape)\nx.turned = way = 1") == []
