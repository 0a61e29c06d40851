"""Regular expressions of others' files, matched by ``re``. It tries one way to match after the other, and a pattern may
have more ways than anybody waits for: such a pattern is refused before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from lpq.registry import LayoutError
from lpq.registry.showing import brief

LONGEST = 1000
"""The most characters of a pattern."""
NAME = 100
"""The characters of a long name of a layer: a repeat can end behind each of them."""
WAYS = 10**9
"""The most ways of the patterns of a list, as four ``.*`` and ten alternatives have them. A name takes some seconds at
worst."""
CHARACTERS = ("ANY", "LITERAL", "NOT_LITERAL", "IN")
"""The parts of a pattern that match one character, as ``re`` calls them."""


def read_patterns(texts: Iterable[str]) -> list[re.Pattern[str]]:
    """Return the patterns of a list, all of which together can be matched in little time."""
    patterns, left = [], WAYS
    for text in texts:
        try:
            if len(text) > LONGEST:
                raise LayoutError(f"it has {len(text)} characters, and the most are {LONGEST}")
            ways = _ways(_parser.parse(text))
            if ways > left:
                among = "" if left == WAYS else ", with the patterns before it"
                raise LayoutError(f"there are too many ways to match it{among}, which would take long")
            patterns.append(re.compile(text))
        except (re.error, RecursionError, OverflowError, LayoutError) as error:
            raise LayoutError(f"config.json: {brief(text)} is no pattern of layers that lpq reads: {error}") from error
        left -= ways
    return patterns


def _ways(tree: Any) -> int:
    """Return the number of ways in which a long name may match, at most."""
    ways = []
    for op, argument in tree:
        kind = str(op)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = min(argument[0], NAME), min(argument[1], NAME), argument[2]
            if most > 1 and (len(body) != 1 or str(body[0][0]) not in CHARACTERS):
                raise LayoutError("it repeats more than one character")
            ways.append(most - least + _ways(body))
        elif kind == "BRANCH":
            ways.append(sum(map(_ways, argument[1])))
        elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            ways.append(_ways(argument[-1]))
        elif kind not in (*CHARACTERS, "AT"):
            raise LayoutError(f"it has {kind}")
    return math.prod(ways)
