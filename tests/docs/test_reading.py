"""The page for readers of the code names files that are there, and ten to begin with."""

from __future__ import annotations

import re

from snippets import ROOT

import lpq

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


def test_it_has_the_tensors_that_its_recipe_keeps() -> None:
    recipe = lpq.recipe("fp8-current")
    assert "The example is `fp8-current`" in PAGE
    assert (recipe.save_x, recipe.save_w) == ("encoded", "weight")
    saved = " ".join(PAGE.split()).partition("**Backward.**")[0]
    assert "The column operand of `x` is saved for backward" in saved
    assert "`w.save=weight`: the weight is saved with its amax" in saved


def test_its_files_are_about_as_long_as_it_says() -> None:
    paths = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGE, re.MULTILINE)
    lines = sum(len((ROOT / path).read_text().splitlines()) for path in paths)
    stated = re.search(r"some ([\d,]+) lines", PAGE)
    assert stated
    assert abs(lines - int(stated[1].replace(",", ""))) < 100


def test_the_glossary_is_short_and_its_words_are_used() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[2]
    words = re.findall(r"^\| (\w+) \| ", page, re.MULTILINE)[1:]
    assert 10 < len(words) <= 15
    code = "\n".join(path.read_text() for path in (ROOT / "lpq").rglob("*.py")).lower()
    assert [word for word in words if len(re.findall(rf"\b{word}s?\b", code)) < 20] == []


def test_no_page_has_another_word_for_a_product() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lpq").rglob("*.py")]:
        assert not re.search(r"\bGEMMs?\b", path.read_text()), path
