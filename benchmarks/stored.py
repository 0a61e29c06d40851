"""Results as files: one JSON for each part, and the marked places of a page that show them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks import plots, scaling, tables
from lpq.bench import machine

FOLDER = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "performance.md", DOCS / "fused.md", DOCS / "evidence.md", Path(__file__).parent / "NOTES.md")
"""The pages that show results."""
CHARTS = DOCS / "assets"
MARK = re.compile(r"(<!-- benchmarks: (\S+) (\S+)((?:\n(?:(?!-->).)*)?) -->\n).*?(<!-- end -->)", re.DOTALL)
"""``<!-- benchmarks: FILE WHAT -->`` … ``<!-- end -->``: WHAT is a table of that file, ``environment`` or ``chart``.
Lines below WHAT stand on the page once there is such a file."""
CHART = re.compile(r"assets/performance-([\w-]+)\.svg")


SAME = ("device", "devices", "processor", "torch", "cuda", "lpq", "peers")
"""The entries that rows of one file have in common."""


class StoredError(Exception):
    """Results that are not there, or are none."""


def part_of(stem: str) -> str:
    """``stack-2`` is of the part ``stack``."""
    return stem.partition("-")[0]


def save(folder: Path, stem: str, record: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Write a result with the record of its machine, and return both as they stand in the file."""
    whole = {"part": part_of(stem), "environment": record, **result}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def earlier(folder: Path, stem: str, record: dict[str, Any], but: Collection[str] = ()) -> dict[str, Any] | None:
    """The result of this name that is there already, if there is one; its command goes before the one of ``record``.

    It is an error if its rows are of another machine or version, but for what is named in ``but``.
    """
    if not (folder / f"{stem}.json").exists():
        return None
    found = _read(folder / f"{stem}.json")
    then = found["environment"]
    if other := [key for key in SAME if key not in but and then.get(key) != record.get(key)]:
        words = ", ".join(f"{key} {then.get(key)} then and {record.get(key)} now" for key in other)
        raise StoredError(f"its rows in {folder} were measured elsewhere ({words}): choose another --out")
    commands = [*then["command"].split("; "), record["command"]]
    record["command"] = "; ".join(dict.fromkeys(commands))
    return found


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """All results of a folder by the names of their files, and those that several files make together."""
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise StoredError(f"{folder} has no results: `python -m benchmarks --out {folder}` measures them, on a GPU")
    return found | scaling.over_ranks(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoredError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("part") not in list(tables.OF):
        raise StoredError(f"{path} is no result of a benchmark: it names none of the parts {', '.join(tables.OF)}")
    try:
        machine.in_words(found["environment"])
        tables.OF[found["part"]](found)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoredError(f"{path} is no whole result of {found['part']}: {type(error).__name__}: {error}") from error
    return found


def show(result: dict[str, Any]) -> None:
    """Print its tables, and what failed."""
    for table in tables.OF[result["part"]](result).values():
        table.show()
    if missing := tables.absent(result):
        print(missing)
    for line in tables.failures(result):
        print(f"failed: {line}")


def plot(folder: Path, stem: str, result: dict[str, Any], prefix: str = "") -> None:
    """Draw it into a folder."""
    plots.draw(result, folder / f"{prefix}{stem}.svg")


def charted(page: str) -> list[str]:
    """The results whose charts a page has."""
    return CHART.findall(page)


def filled(page: str, results: dict[str, dict[str, Any]]) -> str:
    """A page with its marked places as the results have them; a place whose file is missing stays as it is."""

    def fill(match: re.Match[str]) -> str:
        start, stem, what, words, end = match.groups()
        if stem not in results:
            return match.group()
        return "\n\n".join([start.rstrip(), *filter(None, [words.strip()]), _text(stem, results[stem], what), end])

    return MARK.sub(fill, page)


def _text(stem: str, result: dict[str, Any], what: str) -> str:
    if what == "chart":
        return f"![{plots.caption(result)}](assets/performance-{stem}.svg)"
    if what == "environment":
        record = result["environment"]
        return f"{machine.in_words(record)}; `{record['command']}`."
    return tables.OF[result["part"]](result)[what].markdown()
