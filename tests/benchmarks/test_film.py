"""The film of the terminal is drawn from a record of a run, and shows nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import pytest

from benchmarks import film
from benchmarks.film import FILM, HELD, LENGTH, RATE, RECORD, Record
from benchmarks.screen import Screen, text_of

ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def lines(output: str, columns: int = 20, rows: int = 3) -> list[str]:
    screen = Screen(columns, rows)
    screen.write(output)
    return [text_of(row) for row in screen.rows()]


def test_the_film_is_what_the_record_gives() -> None:
    assert FILM.read_text() == film.drawn(film.read(RECORD)), "run python -m benchmarks.film"


def test_another_record_gives_another_film() -> None:
    record = film.read(RECORD)
    other = [(at, text.replace("held-out", "made-up")) for at, text in record.output]
    assert film.drawn(replace(record, output=other)) != FILM.read_text()


def test_all_words_of_the_film_came_out_of_the_run() -> None:
    record = film.read(RECORD)
    printed = "".join(ESCAPE.sub("", text) for _, text in record.output).replace("\r", "").replace("\n", "")
    printed += f"$ {record.command}"
    words = re.findall(r"<tspan[^>]*>([^<]+)</tspan>", FILM.read_text())
    assert len(words) > 200
    assert [word for word in map(unescape, words) if word not in printed] == []


def test_it_ends_with_the_conclusion_of_a_whole_run() -> None:
    last = " ".join(text_of(row).strip() for row in film.pictures(film.read(RECORD))[-1])
    assert "bf16 with another seed ends" in last
    assert "On a CPU low precision is emulated" in last


def test_it_is_one_picture_without_scripts_or_links() -> None:
    root = ElementTree.fromstring(FILM.read_text())
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names == {"svg", "title", "style", "rect", "circle", "text", "tspan"}
    assert "http" not in FILM.read_text().replace("http://www.w3.org/2000/svg", "")


def test_a_row_is_seen_as_long_as_it_stood_there() -> None:
    record = Record("do", 20, 3, [(0.0, "one\r\n"), (5.0, "\x1b[1A\r\x1b[2Ktwo\r\n"), (10.0, "end")])
    screens = film.pictures(record)
    assert len(screens) == round((LENGTH - HELD) * RATE) + 1
    assert [text_of(row) for row in screens[0]] == ["$ do", "one", ""]
    half = len(screens) // 2
    found = {text_of(row.row): (row.place, row.first, row.end) for row in film.shown(screens)}
    assert found == {
        "$ do": (0, 0, len(screens)), "one": (1, 0, half), "two": (1, half, len(screens)),
        "end": (2, len(screens) - 1, len(screens)),
    }  # fmt: skip


def test_the_screen_does_what_a_terminal_does() -> None:
    assert lines("ab\r\ncd\r\nef\r\ngh") == ["cd", "ef", "gh"]  # it scrolls
    assert lines("abcdef\r\x1b[2Kxy") == ["xy", "", ""]
    assert lines("abcdef\rxy\x1b[K") == ["xy", "", ""]
    assert lines("abc", columns=2) == ["ab", "c", ""]
    assert lines("a\x1b[?25lb") == ["ab", "", ""]
    screen = Screen(4, 1)
    screen.write("\x1b[1;36ma\x1b[0mb\x1b[38;5;237mc\x1b[38;2;1;2;3md")
    assert [cell.style for cell in screen.rows()[0]] == [("#56d4dd", "bold"), (), ("#3a3a3a",), ("#010203",)]


@pytest.mark.parametrize("output", ["\x1b[5n", "\x1b[48;5;3m", "\a"])
def test_the_screen_refuses_what_it_does_not_know(output: str) -> None:
    with pytest.raises(ValueError, match="the screen knows no"):
        lines(output)
