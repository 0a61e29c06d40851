"""The fenced blocks of README.md and docs/, and what runs each of them.

A block without a title is run: Python in one namespace for the page, ``python -m lpq …`` and ``pip install …`` lines as
commands, with ``NAME=VALUE`` before them. A block with ``title="path"`` is a file, written before what comes after it
runs. A comment before a block says what else there is to know: ``<!-- not run: reason -->``,
``<!-- read by lpq.recipe -->`` (or ``lpq.policy``), ``<!-- added to class Name -->``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = ("tutorial", "own-format")
"""Pages that are notebooks as well; what runs is the notebook (``test_notebooks.py``)."""

_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]+?) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NOTE = re.compile(r"not run: (?P<reason>.+)|read by lpq\.(?P<reader>recipe|policy)|added to class (?P<owner>\w+)")
_INFO = re.compile(r'(?P<language>\w*)(?: title="(?P<title>[^"]+)")?')
TYPED = "python -m lpq "
"""What a page has people type, since ``lpq`` alone may be the printer queue of CUPS."""
KNOWN = {"python", "shell", "toml", "cpp", "text"}


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    title: str | None = None
    """The file that it is."""
    reason: str | None = None
    """Why it is not run."""
    reader: str | None = None
    """The reader of the block: ``recipe`` or ``policy``."""
    owner: str | None = None
    """The class of the file to which it is added."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The command lines of a shell block."""
        lines = [line.removeprefix("$ ").strip().replace(TYPED, "lpq ") for line in self.code.splitlines()]
        return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("info")) + 1
        info, note = _INFO.fullmatch(match["info"].strip()), _NOTE.fullmatch(match["note"] or "")
        assert info, f"{page}:{line}: the site cannot show {match['info']!r}"
        said = note.groupdict() if note else {}
        found.append(Block(page, line, code=match["code"], **info.groupdict(), **said))
    return found
