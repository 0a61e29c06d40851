"""A film of a terminal as one SVG: ``make train``, recorded once and drawn from the record.

``python -m benchmarks.film --record`` runs the command of the record's first line in a terminal of that size, here, and
writes what came out of it and when, as asciinema's format does (version 2: JSON, one line for each piece of output).
Without options the film is drawn from the record. Nothing in it is typed by hand but the line of its title.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fcntl import ioctl
from html import escape
from itertools import groupby
from pathlib import Path

from benchmarks.screen import Row, Screen, text_of

RECORD = Path(__file__).parent / "results" / "train.cast"
FILM = Path(__file__).parents[1] / "docs" / "assets" / "train.svg"
COMMAND = "make train"
COLUMNS, ROWS = 96, 26
LENGTH, HELD = 30.0, 8.0
"""Seconds of the film, and the seconds of them in which its last picture stands."""
RATE = 4
"""Pictures a second, at most."""
CHARACTER, LINE, EDGE, TITLE, FONT = 7.9, 17.0, 16.0, 34.0, 13
STYLE = """
text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
.g { visibility: hidden; } .last { visibility: visible; }
.bold { font-weight: 700; } .dim { opacity: 0.6; } .italic { font-style: italic; }
"""


@dataclass(frozen=True)
class Record:
    """A command, the size of its terminal, and its output with the seconds at which each piece came."""

    command: str
    columns: int
    rows: int
    output: Sequence[tuple[float, str]]

    @property
    def seconds(self) -> float:
        return self.output[-1][0]


@dataclass(frozen=True)
class Shown:
    """A row of the screen, and the pictures in which it stands there: from ``first`` up to ``end``."""

    place: int
    row: Row
    first: int
    end: int


def read(path: Path) -> Record:
    """The record in a file."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    about = json.loads(head)
    output = [(float(at), str(text)) for at, kind, text in map(json.loads, lines) if kind == "o"]
    return Record(about["command"], about["width"], about["height"], output)


def pictures(record: Record) -> list[list[Row]]:
    """The screens of the film, ``RATE`` for each second; the last one is held."""
    screen = Screen(record.columns, record.rows)
    screen.write(f"\x1b[1m$ {record.command}\x1b[0m\r\n")
    count = round((LENGTH - HELD) * RATE)
    left = list(record.output)
    found = []
    for i in range(count + 1):
        until = record.seconds * i / count
        while left and left[0][0] <= until:
            screen.write(left.pop(0)[1])
        found.append(screen.rows())
    return found


def shown(screens: Sequence[Sequence[Row]]) -> list[Shown]:
    """The rows of all pictures, each once for as long as it stands."""
    found = []
    for place in range(len(screens[0])):
        first = 0
        for row, same in groupby(screen[place] for screen in screens):
            end = first + len(list(same))
            if text_of(row).strip():
                found.append(Shown(place, row, first, end))
            first = end
    return found


def drawn(record: Record) -> str:
    """The film."""
    screens = pictures(record)
    rows = shown(screens)
    width, height = 2 * EDGE + record.columns * CHARACTER, TITLE + record.rows * LINE + EDGE
    times = sorted({(row.first, row.end) for row in rows})
    moving = [_keyframes(first, end, len(screens)) for first, end in times]
    speed = record.seconds / (LENGTH - HELD)
    pace = f"recorded on a CPU, shown {speed:.1f} times as fast"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img">',
        f"<title>{escape(record.command)}: {pace}</title>",
        f"<style>{STYLE}@media (prefers-reduced-motion: no-preference) {{\n.last {{ visibility: hidden; }}",
        *moving,
        "}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#161b22"/>',
        *(f'<circle cx="{EDGE + 5 + 18 * i}" cy="17" r="5.5" fill="#3a4252"/>' for i in range(3)),
        f'<text x="{width / 2:.0f}" y="21" font-size="12" fill="#8b949e" text-anchor="middle">{pace}</text>',
        *(_drawn(row, len(screens)) for row in rows),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _keyframes(first: int, end: int, count: int) -> str:
    """The rule by which what stands in these pictures is seen in them, over and over."""
    at, until = (100 * i / RATE / LENGTH for i in (first, end))
    name = f"f{first}-{end}"
    hidden = "" if end == count else f" {until:.3f}% {{ visibility: hidden; }}"
    before = "" if first == 0 else "0% { visibility: hidden; } "
    frames = f"@keyframes {name} {{ {before}{at:.3f}% {{ visibility: visible; }}{hidden} }}"
    return f"{frames} .{name} {{ animation: {name} {LENGTH:.0f}s step-end infinite; }}"


def _drawn(row: Shown, count: int) -> str:
    y = TITLE + LINE * row.place + FONT
    parts: list[str] = []
    x = 0
    for style, cells in groupby(row.row, key=lambda cell: cell.style):
        text = "".join(cell.character for cell in cells)
        if text.strip():
            left = len(text) - len(text.lstrip())
            bare = text.strip()
            place = f'x="{EDGE + (x + left) * CHARACTER:.1f}" textLength="{len(bare) * CHARACTER:.1f}"'
            parts.append(f"<tspan {place}{_look(style)}>{escape(bare, quote=False)}</tspan>")
        x += len(text)
    kind = f"g f{row.first}-{row.end}" + (" last" if row.end == count else "")
    spans = "".join(parts)
    return f'<text class="{kind}" y="{y:.0f}" font-size="{FONT}" fill="#d5dbe3">{spans}</text>'


def _look(style: tuple[str, ...]) -> str:
    colour = "".join(f' fill="{part}"' for part in style if part.startswith("#"))
    words = " ".join(part for part in style if not part.startswith("#"))
    return colour + (f' class="{words}"' if words else "")


def record(path: Path, folder: Path) -> None:
    """Run the command in a terminal in ``folder``, and write its output with the times."""
    main, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    environment.pop("COLORTERM", None)
    began = time.monotonic()
    process = subprocess.Popen(COMMAND.split(), cwd=folder, env=environment, stdin=other, stdout=other, stderr=other)
    os.close(other)
    pieces: list[tuple[float, str]] = []
    rest = b""
    while True:
        ready, _, _ = select.select([main], [], [], 0.2)
        if not ready and process.poll() is not None:
            break
        if ready:
            try:
                rest += os.read(main, 1 << 16)
            except OSError:  # the other end was closed
                break
            whole = rest.decode("utf-8", errors="ignore")
            rest = rest[len(whole.encode()) :]
            if not pieces or whole != pieces[-1][1] or "\n" in whole:  # a bar that is drawn again as it is
                pieces.append((time.monotonic() - began, whole))
    if code := process.wait():
        raise SystemExit(f"{COMMAND} ended with {code}: there is nothing to show")
    about = {
        "version": 2, "width": COLUMNS, "height": ROWS, "command": COMMAND,
        "timestamp": int(datetime.now(UTC).timestamp()), "env": {"TERM": "xterm-256color"},
    }  # fmt: skip
    lines = [json.dumps(about), *(json.dumps([round(at, 2), "o", text]) for at, text in pieces)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.film")
    parser.add_argument("--record", metavar="CLONE", type=Path, help="record it anew, in this clone")
    given = parser.parse_args()
    if given.record is not None:
        record(RECORD, given.record)
    FILM.write_text(drawn(read(RECORD)), encoding="utf-8")
    print(FILM)


if __name__ == "__main__":
    main()
