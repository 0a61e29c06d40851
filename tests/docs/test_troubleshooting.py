"""The page of remedies quotes words that lpq raises or warns with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
QUOTED = [words for row in ROWS for words in re.findall(r"`([^`]{10,})`", row) if " " in words]


@pytest.fixture(scope="module")
def source() -> str:
    """The library's text, with literals that follow each other as one."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "lpq").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_something_is_quoted() -> None:
    assert len(QUOTED) > 12


@pytest.mark.parametrize("words", QUOTED)
def test_the_words_are_those_of_the_library(words: str, source: str) -> None:
    assert words in source
