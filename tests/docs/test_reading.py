"""The page for readers of the code names files that are there, and ten to begin with."""

from __future__ import annotations

import re

from snippets import ROOT

PAGE = (ROOT / "docs" / "reading.md").read_text()


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:lpq|plugins)/[\w/.]+)`", PAGE)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_it_says_of_them_stands_in_them() -> None:
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 10
    for path, words in rows:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+)`", words):
            if not name.endswith(".py"):
                assert name.rpartition(".")[2] in source, (path, name)


def test_the_glossary_is_short_and_its_words_are_used() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[2]
    words = re.findall(r"^\| (\w+) \| ", page, re.MULTILINE)[1:]
    assert 10 < len(words) <= 15
    code = "\n".join(path.read_text() for path in (ROOT / "lpq").rglob("*.py")).lower()
    assert [word for word in words if len(re.findall(rf"\b{word}s?\b", code)) < 20] == []


def test_no_page_has_another_word_for_a_product() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lpq").rglob("*.py")]:
        assert not re.search(r"\bGEMMs?\b", path.read_text()), path
