"""Ranks that meet in the store of the job, and not in a collective: where not all come, none is left in one.

The text of a rank lies in the store until the others look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic

from lpq.registry.warning import warn
from lpq.torch_private.distributed import Store, is_imitated, job_store, job_timeout

FREE = ("cpu",)
"""Devices that the host need not wait for: ranks compare in a collective there, and not in the store."""
PATIENCE = 30.0
"""Seconds after which a rank that waits for the others warns. They may be late for good reasons, so it waits on."""
SOON = 5.0
"""Seconds within which ranks that share a model meet, if all of them come to the same place."""
KEYS = ("text", "other", "came", "ends", "over")
"""The keys of a meeting: the text of the first rank, whether another one brought another text, how many came,
how many wanted to end it, and how it ended."""


def meet(ranks: Sequence[int], about: str, text: str, seconds: float | None, waiting: str) -> bool | None:
    """Whether all of these ranks brought the same text; None, on all ranks, if not all came within the ``seconds`` of
    one rank. These are at most the ``limit``, which None stands for. ``about``: the subject of the meeting.
    ``waiting``: the warning of a rank that waits long."""
    if is_imitated():
        return True
    store, place = job_store(), _place(ranks, about)
    end = monotonic() + (limit() if seconds is None else min(seconds, limit()))
    while True:
        number = store.add(f"{place}/number", 0)
        at = f"{place}/{number}"
        if store.compare_set(f"{at}/text", "", text) != text.encode():
            store.set(f"{at}/other", "1")
        everybody = store.add(f"{at}/came", 1) == len(ranks)
        if (everybody or not _is_over(store, at, end, waiting)) and store.add(f"{at}/ends", 1) == 1:
            if everybody:  # and so nobody reads earlier texts
                store.delete_key(f"{place}/told")
                _remove(store, place, number)
            store.add(f"{place}/number", 1)
            store.set(f"{at}/over", "all" if everybody else "some")
        if store.get(f"{at}/over") == b"all":
            return not store.check([f"{at}/other"])
        if seconds is not None or monotonic() >= end:
            return None


def limit() -> float:
    """How long a rank waits for others, in seconds: half the timeout of the job, after which the ranks that wait for it
    in a collective would be ended, and the job with them, before this rank could give the reason."""
    return job_timeout() / 2


def tell(ranks: Sequence[int], about: str) -> None:
    """Tell these ranks to meet."""
    if not is_imitated():
        job_store().set(f"{_place(ranks, about)}/told", "1")


def is_told(ranks: Sequence[int], about: str) -> bool:
    """Whether one of these ranks wants to meet, and not all ranks have met since."""
    return not is_imitated() and job_store().check([f"{_place(ranks, about)}/told"])


def _place(ranks: Sequence[int], about: str) -> str:
    return f"lpq/{hashlib.sha256(repr(([*ranks], about)).encode()).hexdigest()[:32]}"


def _is_over(store: Store, at: str, end: float, waiting: str) -> bool:
    """Whether another rank ended the meeting before this rank has waited long enough."""
    if end - monotonic() > PATIENCE:
        if _ends(store, at, PATIENCE):
            return True
        warn(waiting)
    return _ends(store, at, end - monotonic())


def _ends(store: Store, at: str, seconds: float) -> bool:
    with suppress(RuntimeError):  # a store of files raises no class of its own
        store.wait([f"{at}/over"], timedelta(seconds=max(seconds, 0.001)))
        return True
    return False


def _remove(store: Store, place: str, number: int) -> None:
    """Remove earlier meetings."""
    while number and store.check([f"{place}/{(number := number - 1)}/came"]):
        for key in KEYS:
            store.delete_key(f"{place}/{number}/{key}")
