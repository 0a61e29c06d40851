"""Work that is shared out among the processes that torchrun starts: each takes the next piece that no other has taken.

They share a store and a folder, and no process group: so each works as one process alone does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE = 0.05
"""Seconds between two looks at the store."""


@dataclass(frozen=True)
class Processes:
    """All processes that share the work, as one of them sees them; without a store there is this one alone."""

    store: Store | None = None
    rank: int = 0
    size: int = 1

    @property
    def many(self) -> bool:
        """Whether torchrun started them, be it only one."""
        return self.store is not None

    @classmethod
    def of_torchrun(cls, store: Store) -> Self:
        return cls(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def take(self, name: str) -> bool:
        """Whether no process took this piece of work before; from then on it is this one's."""
        return self.store is None or self.store.add(f"lpq/taken/{name}", 1) == 1

    def exchange(self, what: str, mine: Sequence[str], stopped: Callable[[], object]) -> list[str]:
        """Return the words of all processes, once all have come. One that is ``stopped`` waits for no other.

        The first process, which may have the store, returns when all have read.
        """
        if self.store is None:
            return [*mine]
        self.store.set(f"lpq/{what}/{self.rank}", json.dumps([*mine]))
        keys = [f"lpq/{what}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            if stopped():
                return [*mine]
            time.sleep(PATIENCE)
        words = [word for key in keys for word in json.loads(self.store.get(key))]
        read = self.store.add(f"lpq/{what}/read", 1)
        while self.rank == 0 and read < self.size and not stopped():
            time.sleep(PATIENCE)
            read = self.store.add(f"lpq/{what}/read", 0)
        return words
