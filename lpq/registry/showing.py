"""Text of others as messages show it: from callers, files, the metadata of packages.

A message has a few lines, nothing in it steers the terminal, and a command in it has only names that were checked.
"""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Iterable, Sequence

DISTRIBUTION = re.compile(r"[A-Z0-9](?:[A-Z0-9._-]{0,98}[A-Z0-9])?", re.ASCII | re.IGNORECASE)
"""The name of a distribution, by PEP 508; none in use is longer."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 200, 200, 100


def brief(value: object) -> str:
    """The repr of a value, of whatever size and depth, in at most a line or two."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} of very large numbers"


def printable(text: str) -> str:
    """Text with what is no letter, sign or end of line written out, as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The names, or the first few of them and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def number(count: int, one: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def preformatted(text: object) -> str:
    """A text as a notebook shows it: in columns, as in a terminal."""
    return f"<pre>{html.escape(str(text))}</pre>"


class Readable:
    """A result with a text for people (``__str__``), which a notebook shows, too."""

    def _repr_html_(self) -> str:
        return preformatted(self)


def pip(command: str, names: Iterable[str], otherwise: str) -> str:
    """``pip install acme`` if all of these are names of distributions; otherwise another remedy."""
    every = list(names)
    if every and all(DISTRIBUTION.fullmatch(name) for name in every):
        return " or ".join(f"pip {command} {name}" for name in every)
    return otherwise
