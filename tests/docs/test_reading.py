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
