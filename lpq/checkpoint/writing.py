"""The writer that DCP uses: its files, then a manifest, then the name.

Each rank computes digests of the files that it wrote. The digests reach rank 0 with DCP's own results, and rank 0
closes the checkpoint inside DCP's exchange of errors: whatever fails on any rank, no rank waits and nothing gets the
name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lpq.checkpoint.errors import CheckpointWarning
from lpq.checkpoint.finding import REPLACED, STEP, manifests_in, steps_in
from lpq.checkpoint.index import as_json
from lpq.checkpoint.ranks import CheckpointRanks
from lpq.files import disk
from lpq.files.claim import LOCK, Claim, left_behind
from lpq.files.disk import PARTIAL
from lpq.files.manifest import INDEX, MANIFEST, PICKLE, is_ours, is_whole, remove
from lpq.registry.showing import listed
from lpq.registry.warning import warn


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint to ``target``."""

    def __init__(self, target: Path, small: dict[str, bytes], keep: int | None, claim: Claim | None) -> None:
        """``small``: files to write beside DCP's. ``keep``: how many checkpoints of the run stay.

        ``claim``: on the first rank, the right to write it.
        """
        self.target, self._small, self._keep, self._claim = target, small, keep, claim
        self._partial = target.with_name(target.name + PARTIAL)
        self._staged: dict[str, Any] | None = None
        super().__init__(self._partial)

    def release(self) -> None:
        """Let another job write it."""
        if self._claim is not None:
            self._claim.release()

    def copy(self, state_dict: dict[str, Any]) -> None:
        """Make the copy in the CPU's memory, while an error still reaches all ranks; ``stage`` gives it to DCP."""
        self._staged = super().stage(state_dict)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy that is written while training goes on."""
        assert self._staged is not None
        return self._staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and digest them."""
        try:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            future: Future[list[WriteResult]] = Future()
            future.set_result(_Written(results, self._entries(names)))
        except Exception as error:  # an error that cannot be pickled would never reach the other ranks
            raise CheckpointRanks.as_error(error) from error
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Close the checkpoint and give it its name, on rank 0 when all have written."""
        try:
            super().finish(metadata, results)
            entries = {name: entry for of_rank in results for name, entry in of_rank.entries.items()}  # type: ignore[attr-defined]
            self._small[INDEX] = as_json(metadata, [result for of_rank in results for result in of_rank])
            for name, data in self._small.items():
                disk.write(self._partial / name, data)
            entries.update(self._entries([*self._small, PICKLE]))
            disk.write(self._partial / MANIFEST, self._manifest(entries))
            self._publish()
        except Exception as error:
            raise CheckpointRanks.as_error(error) from error

    def _entries(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        paths = {name: self._partial / name for name in sorted(names)}
        return {n: {"bytes": p.stat().st_size, "sha256": disk.digest(p)} for n, p in paths.items()}

    def _manifest(self, entries: dict[str, dict[str, Any]]) -> bytes:
        """The list of files, with a time of writing that is later than any other of the run, whatever clocks show."""
        others = manifests_in(self.target.parent) if STEP.fullmatch(self.target.name) else {}
        last = max((other.time for other in others.values()), default=0)
        return json.dumps({"files": entries, "written": max(time.time_ns(), last + 1)}, indent=1).encode()

    def _publish(self) -> None:
        assert self._claim is not None
        refusals = self._claim.refused()
        replaced = self.target.with_name(self.target.name + REPLACED)
        aside = is_ours(self.target)
        if aside:
            remove(replaced, self.target)
            disk.publish(self.target, replaced)  # a process that ends now leaves this checkpoint, which is whole
        try:
            self._claim.publish(self.target, MANIFEST)
        except BaseException:
            if aside:
                disk.publish(replaced, self.target)
            raise
        remove(replaced, self.target)
        if self._keep is not None:
            self._tidy(self._keep)
        if refusals:
            warn(
                f"checkpoint {self.target} is this process's. While it was written, {', '.join(refusals)} wanted to "
                "save it, too, and was refused: give each job a directory of its own",
                CheckpointWarning,
            )

    def _tidy(self, keep: int) -> None:
        """Remove all checkpoints of the run but the last whole ones up to this one: it did not go on from the others. A
        checkpoint counts as whole if its files have their sizes. Whole ones of later steps stay until the second save
        after the run went back, and the first names them. A checkpoint that another job is writing stays. So does, with
        a warning, anything that has the name of a checkpoint and was not written by lpq.
        """
        steps = steps_in(self.target.parent)
        match = STEP.fullmatch(self.target.name)
        assert match is not None  # what is published for a step has its name
        own = int(match[1])
        ours = {path: manifest for path, manifest in manifests_in(self.target.parent).items() if not path.is_symlink()}
        upto = [path for step, ending, path in steps if path in ours and not ending and step <= own]
        whole = [path for path in upto if path == self.target or is_whole(path)]
        before = max((ours[path].time for path in upto if path != self.target), default=0)
        later, others = [], []
        for step, ending, path in reversed(steps):
            if ending == PARTIAL and (path / LOCK).exists():
                if left_behind(path):
                    Claim.take(path.with_name(path.name.removesuffix(PARTIAL))).release()
            elif path not in ours:
                others.append(path.name)
            elif step > own and ours[path].time >= before and is_whole(path):
                later.append(path.name)
            elif path not in whole[:keep]:
                remove(path)
        where = self.target.parent
        if later:
            warn(
                f"the run went back to {self.target.name}, and keep={keep} will remove the checkpoints of later steps "
                f"at the next save: {listed(later)} in {where}. Move away the ones that you want to keep",
                CheckpointWarning,
            )
        if others:
            warn(
                f"keep={keep} leaves links in {where}, and directories without a {MANIFEST} of lpq's: {listed(others)}",
                CheckpointWarning,
            )


class _Written(list[WriteResult]):
    """A rank's results for DCP, with the entries of its files for the manifest."""

    def __init__(self, results: list[WriteResult], entries: dict[str, dict[str, Any]]) -> None:
        super().__init__(results)
        self.entries = entries
