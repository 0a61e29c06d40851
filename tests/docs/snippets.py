"""The fenced blocks of README.md and docs/, and what runs each of them.

A block without a title is run: Python in one namespace for the page, ``lpq …`` and ``pip install …`` lines as
commands, ``toml recipe`` and ``toml policy`` by lpq. A block with ``title="path"`` is a file, written (or,
with ``insert="Class"``, added to a class in it) before what comes after it runs. A block that cannot run has
``<!-- not run: reason -->`` before it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
KNOWN = {"python", "shell", "toml", "text"}


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    """What else is in the fence's first line, apart from attributes."""
    code: str
    reason: str | None
    """Why it is not run."""
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The command lines of a shell block."""
        lines = [line.removeprefix("$ ").strip() for line in self.code.splitlines()]
        return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        info = match["info"]
        words = _ATTRIBUTE.sub("", info).split() or [""]
        line = text.count("\n", 0, match.start("info")) + 1
        attributes = dict(_ATTRIBUTE.findall(info))
        found.append(
            Block(page, line, words[0], tuple(words[1:]), match["code"], match["reason"], attributes)
        )
    return found
