"""The pages about losses show what the stored curves give, every training of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import evidence
from lpq.train import gaps

FOUND = evidence.read()


def test_the_pages_show_the_stored_curves() -> None:
    pages = [page.read_text(encoding="utf-8") for page in evidence.PAGES]
    assert [evidence.filled(page, FOUND) for page in pages] == pages, "python -m benchmarks.evidence"
    page = "".join(pages)
    shown = {(match[2], match[3]) for match in evidence.MARK.finditer(page)}
    assert {name for name, _ in shown} <= set(FOUND), "the page shows curves of which there is no file"
    for name in FOUND:
        assert {(name, "table"), (name, "made")} <= shown, f"{name} is stored, and no page shows it"
        assert f"assets/evidence-{name}.svg" in page


@pytest.mark.parametrize("name", FOUND)
def test_no_seed_is_left_out(name: str) -> None:
    """Seeds count from 0, and each has its baseline."""
    base = {t.seed for t in FOUND[name] if t.baseline}
    assert base == {*range(len(base))}
    for title in {t.title for t in FOUND[name]}:
        own = {t.seed for t in FOUND[name] if t.title == title}
        assert own == {*range(len(own))}, title
        assert own <= base, title
    assert len({t.text for t in FOUND[name]}) == 1


@pytest.mark.parametrize("name", FOUND)
def test_a_figure_has_every_recipe(name: str) -> None:
    figure = (evidence.CHARTS / f"evidence-{name}.svg").read_text(encoding="utf-8")
    for title in (gap.title for gap in gaps.gaps(FOUND[name]) if gap.mean is not None):
        assert title in re.sub(r"\s+", " ", figure)


def test_a_mark_without_curves_stays(tmp_path: Path) -> None:
    page = "<!-- curves: none table -->\nkept\n<!-- end -->\n"
    assert evidence.filled(page, FOUND) == page
