"""The site builds with warnings as errors, and a reader's browser fetches nothing from anywhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from snippets import ROOT

pytest.importorskip("mkdocs", reason="the site is built where mkdocs is installed (the dev group has it)")

FETCHES = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "video": "src"}
BUILD = ("build", "--strict")  # with --quiet no warning is counted, and none is an error
SOURCES = "https://github.com/example/lpq"
NOT_FETCHED = {"canonical", "alternate", "prev", "next"}


class Fetched(HTMLParser):
    """List the files that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in FETCHES and given.get("rel") not in NOT_FETCHED:
            self.addresses.append(given.get(FETCHES[tag]) or "")


def foreign(html: str) -> list[str]:
    parser = Fetched()
    parser.feed(html)
    return [address for address in parser.addresses if address.startswith(("http:", "https:", "//"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *BUILD, "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, **closed, "NO_MKDOCS_2_WARNING": "1", "LPQ_REPO_URL": SOURCES},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\n")
    page = tmp_path / "docs" / "index.md"
    codes = []
    for text in ("words", "[a link](nowhere.md)"):
        page.write_text(text)
        codes.append(
            subprocess.run([sys.executable, "-m", "mkdocs", *BUILD], cwd=tmp_path, capture_output=True).returncode
        )
    assert codes == [0, 1]
    assert f"/mkdocs {' '.join(BUILD)}\n" in (ROOT / "Makefile").read_text(), "which make docs calls"


def test_it_builds_without_a_network_and_fetches_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        assert foreign(page.read_text()) == [], page


def test_the_header_leads_to_the_sources_and_asks_nobody_for_stars(site: Path) -> None:
    html = (site / "index.html").read_text()
    assert f'<a href="{SOURCES}"' in html
    assert 'data-md-component="source"' not in html


def test_pages_ask_for_the_list_of_versions_only_where_it_is_published(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser that does not find it reports an error on each page."""
    from mkdocs.config import load_config

    assert '"provider": "mike"' not in (site / "index.html").read_text()
    told = subprocess.run(
        ["make", "--dry-run", "publish-docs", "VERSION=1"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "LPQ_VERSIONS=mike .venv/bin/mike deploy" in told.stdout
    monkeypatch.setenv("LPQ_VERSIONS", "mike")
    assert load_config(str(ROOT / "mkdocs.yml")).extra["version"] == {"provider": "mike"}


def test_no_page_shows_markup(site: Path) -> None:
    """A fence or a link that Markdown did not understand is shown as it was written."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(script|pre|code)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        for markup in ("```", "](", ":::", "**"):
            assert markup not in re.sub(r"<[^>]*>", "", text), f"{page.relative_to(site)} shows {markup}"


MOVED = {
    "recipes": (
        "policies", "policies-that-come-with-lpq", "left-out-by-default", "modules-that-convert-leaves-alone",
        "accumulating-gradients", "operands-kept-for-backward", "save-and-resume",
    ),
    "sharding": (
        "statistics-of-a-whole-weight", "ranks-that-differ", "weights-stored-quantized", "how-often-a-step-reduces",
        "memory-that-it-saves", "checkpoints", "checkpoints-of-others", "your-own-distributed-optimizer",
    ),
    "api": ("models", "observation", "lpq.nn.convert", "lpq.checkpoint.save", "lpq.registry.errors.UnknownFormat"),
}  # fmt: skip
"""Sections that went to pages of their own, by the page that had them."""


def test_an_address_of_a_section_that_moved_leads_to_a_link(site: Path) -> None:
    for page, anchors in MOVED.items():
        html = (site / page / "index.html").read_text()
        assert [anchor for anchor in anchors if f'id="{anchor}"' not in html] == []


def test_a_page_that_fetches_is_noticed() -> None:
    assert foreign('<script src="https://example.com/x.js"></script>') == ["https://example.com/x.js"]
    assert foreign('<link rel="stylesheet" href="//example.com/x.css">') == ["//example.com/x.css"]
    assert foreign('<a href="https://example.com">words</a>') == []


def test_hooks_and_interfaces_are_rendered(site: Path) -> None:
    html = (site / "plugins" / "reference" / "index.html").read_text()
    for name in ("lpq_convert_module", "encode_stochastic", "layout_for", "min_sm", "decode_rotated"):
        assert name in html
