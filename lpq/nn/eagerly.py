"""Blocks in which compiled functions run eagerly. A compiler would leave observers and hooks out of its graphs, and
would compile anew for each recipe that a replay tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock

import torch

_CHANGING = Lock()
"""Held while a block begins or ends."""
_OPEN: list[object] = []
"""The blocks that are open in all threads."""
_FORMER = ExitStack()
"""Restores the stance that the compiler had before the first of them."""


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run what is compiled eagerly inside, compiled functions of other threads as well: the compiler has one stance for
    all threads. Blocks may be nested, and blocks of several threads may end in any order: the first that begins changes
    the stance, and the last that ends restores it. Code that was compiled before serves again behind the block.

    A block cannot begin in compiled code.
    """
    block = object()
    with _CHANGING:
        if not _OPEN:
            _FORMER.enter_context(_eager())
        _OPEN.append(block)
    try:
        yield
    finally:
        with _CHANGING:
            _OPEN.remove(block)
            if not _OPEN:
                _FORMER.close()


def _eager() -> AbstractContextManager[None]:
    words = (
        "a block that runs compiled code eagerly, as for an observer, begins in code that is compiled itself: begin it "
        "outside of that"
    )
    if torch.compiler.is_compiling():
        raise RuntimeError(words)
    try:
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:  # between two graphs of compiled code
        raise RuntimeError(f"{words} ({error})") from error
    return stance
