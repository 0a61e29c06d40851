"""Writing an exported model: beside its place, tensor by tensor, and renamed once everything is on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
from lpq.engines.config_files import as_json
from lpq.engines.names import CONFIG, INDEX, shard_name
from lpq.engines.plan import Assigned, ExportPlan
from lpq.files import disk
from lpq.files.claim import Claim
from lpq.files.safetensors import TensorKind, Writer


def shards(plan: ExportPlan, largest: int) -> list[list[Assigned]]:
    """The tensors of each file: in their order, and no more than ``largest`` bytes unless one alone has more."""
    files: list[list[Assigned]] = [[]]
    filled = 0
    for tensor in plan.tensors:
        size = sum(kind.bytes for kind in tensor.kinds().values())
        if filled + size > largest and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += size
    return files


class Directory:
    """An exported model that is being written."""

    def __init__(self, target: Path, by_file: list[list[Assigned]], small: Mapping[str, bytes]) -> None:
        """``small``: files beside the tensors."""
        self._target = disk.resolved(target)
        if self._target.exists() and not (self._target.is_dir() and not any(self._target.iterdir())):
            raise CheckpointError(f"{target} is there already: give another directory, or remove it")
        self._claim = Claim.take(self._target)
        self._partial = self._claim.partial
        names = [shard_name(number, len(by_file)) for number in range(1, len(by_file) + 1)]
        self._kinds: dict[str, dict[str, TensorKind]] = {
            name: {key: kind for tensor in shard for key, kind in tensor.kinds().items()}
            for name, shard in zip(names, by_file, strict=True)
        }
        self._file_of = {id(tensor): name for name, shard in zip(names, by_file, strict=True) for tensor in shard}
        self._small = {**small, **self._index()}
        self._open: tuple[str, Writer] | None = None

    def add(self, tensor: Assigned, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors that are made of one; these come in the order of the shards."""
        name = self._file_of[id(tensor)]
        if self._open is None or self._open[0] != name:
            self._close()
            self._open = name, Writer(self._partial / name, self._kinds[name])
        for key, value in tensors.items():
            self._open[1].add(key, value)

    def publish(self) -> None:
        """Give it its name, once everything is there."""
        self._close()
        for name, data in self._small.items():
            disk.write(self._partial / name, data)
        self._claim.publish(self._target, CONFIG)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Remove the written files if this fails; if the process ends, the next export to this place removes them."""
        try:
            yield
        except BaseException:
            if self._open is not None:
                self._open[1].close(failed=True)
            raise
        finally:
            self._claim.release()

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _index(self) -> dict[str, bytes]:
        if len(self._kinds) == 1:
            return {}
        total = sum(kind.bytes for tensors in self._kinds.values() for kind in tensors.values())
        weights = {key: name for name, tensors in self._kinds.items() for key in sorted(tensors)}
        return {INDEX: as_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))})}
