"""The objects of a class that are alive in this process, for classes of which torch keeps no list."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def alive(cls: type[T]) -> list[T]:
    """All objects of a class."""
    gc.collect()  # else it would depend on when a rank did it last
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]  # isinstance() may run code
