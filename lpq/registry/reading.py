"""Readers of small text files that a user names; anything else is refused at once."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST = 4 << 20
"""The most bytes of one, if nothing else is said."""


def read_text(path: Path, most: int = MOST) -> str:
    """The text of a file in UTF-8, without the mark with which some editors begin it; or ``OSError``.

    A pipe or a device might never end, or never begin.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a character that no path has
        raise OSError(errno.EINVAL, str(error)) from error
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB")
    return content.decode("utf-8-sig")
