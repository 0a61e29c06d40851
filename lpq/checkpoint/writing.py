"""The writer that DCP uses: its files, then a manifest, then the name.

Each rank digests what it wrote. The digests reach rank 0 with DCP's own results, and rank 0 closes the checkpoint
inside DCP's exchange of errors: whatever fails on any rank, no rank waits and nothing gets the name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lpq.checkpoint import files
from lpq.checkpoint.files import PARTIAL
from lpq.checkpoint.finding import MANIFEST, REPLACED, STEP, steps_in
from lpq.checkpoint.ranks import as_checkpoint_error


class Writer(FileSystemWriter):
    """Writes one checkpoint to ``target``."""

    def __init__(self, target: Path, small: dict[str, bytes], keep: int | None) -> None:
        """``small``: files to write beside DCP's. ``keep``: how many checkpoints of the run stay."""
        self.target, self._small, self._keep = target, small, keep
        self._partial = target.with_name(target.name + PARTIAL)
        self._staged: dict[str, Any] | None = None
        super().__init__(self._partial)

    def copy(self, state_dict: dict[str, Any]) -> None:
        """Make the copy in the CPU's memory, while an error still reaches all ranks; ``stage`` gives it to DCP."""
        self._staged = super().stage(state_dict)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy that is written while training goes on."""
        assert self._staged is not None
        return self._staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank writes, and digest it."""
        try:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            done: Future[list[WriteResult]] = Future()
            done.set_result(_Written(results, self._said(names)))
        except Exception as error:  # an error that cannot be pickled would never reach the other ranks
            raise as_checkpoint_error(error) from error
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: close the checkpoint and give it its name."""
        try:
            super().finish(metadata, results)
            said = {name: entry for written in results for name, entry in written.said.items()}  # type: ignore[attr-defined]
            for name, data in self._small.items():
                files.write(self._partial / name, data)
            said.update(self._said([*self._small, ".metadata"]))
            files.write(self._partial / MANIFEST, json.dumps({"files": said}, indent=1).encode())
            self._publish()
        except Exception as error:
            raise as_checkpoint_error(error) from error

    def _said(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        paths = {name: self._partial / name for name in sorted(names)}
        return {n: {"bytes": p.stat().st_size, "sha256": files.digest(p)} for n, p in paths.items()}

    def _publish(self) -> None:
        replaced = self.target.with_name(self.target.name + REPLACED)
        if self.target.exists():
            _remove(replaced)
            files.publish(self.target, replaced)  # a process that ends now leaves this one, which is whole
        files.publish(self._partial, self.target)
        _remove(replaced)
        if self._keep is not None:
            self._tidy(self._keep)

    def _tidy(self, keep: int) -> None:
        """Remove all checkpoints of the run but the last ones up to this one: from those beyond, it did not go on."""
        found = steps_in(self.target.parent)
        match = STEP.fullmatch(self.target.name)
        assert match is not None
        whole = [path for step, ending, path in found if not ending and step <= int(match[1])]
        for _, _, path in reversed(found):
            if path not in whole[:keep]:
                _remove(path)


class _Written(list[WriteResult]):
    """What DCP is told of a rank's files, with what the manifest will say of them."""

    def __init__(self, results: list[WriteResult], said: dict[str, dict[str, Any]]) -> None:
        super().__init__(results)
        self.said = said


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first: what is left of it if that ends half-way is none."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
