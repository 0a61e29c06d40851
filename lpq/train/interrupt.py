"""Ctrl-C and SIGTERM end a run between two steps, so that the saved run is whole and goes on bitwise."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """Keeps the first SIGINT or SIGTERM while entered, instead of dying of it; the next acts as usual.

    With ``deaf`` the next ones do nothing: torchrun passes signals on, and kills processes that do not end in time.
    Outside the main thread Python delivers no signals, and this does nothing.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.signum: int | None = None
        """The signal that came, if one did."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
        if not self.deaf:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
