"""Checks of a file's owner. Machine code from a file is run if nobody but this user and root can have written it.

Links are resolved, and then the file, its folder and every folder above it must belong to this user or to root, and be
writable by nobody else. Above the folder, a folder that anybody may write is accepted if it is sticky, as ``/tmp`` is:
there nobody can replace another user's files. A group that is this user's alone counts as this user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A file that others can have written; the message gives the reason."""


def fault(folder: Path) -> str | None:
    """Why others could write to a folder, or put another in its place; None: nobody can. It need not be there yet."""
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{place} cannot be reached: {error.strerror or error}"
        if why := _fault(found, sticky=place != real):
            return f"{place} {why}"
    return None


def read(path: Path) -> bytes:
    """Read a file that only this user or root can have written."""
    real = Path(os.path.realpath(path))
    if why := fault(real.parent):
        raise Untrusted(why)
    descriptor = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Untrusted(f"{real.name} in {real.parent} should be a file, and is none")
        if why := _fault(found):
            raise Untrusted(f"a file in {real.parent} {why}")
        return file.read()


def make(folder: Path) -> None:
    """Make a folder, and missing folders above it, for this user alone, whatever the umask."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        try:
            place.mkdir(0o700)
        except FileExistsError:  # another process made it
            continue
        place.chmod(0o700)


def _fault(found: os.stat_result, *, sticky: bool = False) -> str | None:
    me: Callable[[], int] | None = getattr(os, "geteuid", None)
    if me is None:  # a system whose files have no such owners
        return None
    if found.st_uid not in (me(), 0):
        return f"belongs to another user ({found.st_uid})"
    open_to = found.st_mode & OTHERS
    if open_to == stat.S_IWGRP and _is_own_group(found.st_gid, me()):
        return None
    if open_to and not (sticky and found.st_mode & stat.S_ISVTX):
        return "can be written by others"
    return None


def _is_own_group(group: int, user: int) -> bool:
    """Whether a group is the one that many systems make for each user, and has no other member."""
    import grp
    import pwd

    try:
        its, mine = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return mine.pw_gid == group and its.gr_name == mine.pw_name and set(its.gr_mem) <= {mine.pw_name}
