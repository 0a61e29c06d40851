"""Saving: written beside its place by all ranks, and given its name once every file of it is on the disk."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp

from lpq.checkpoint.argument_order import model_first
from lpq.checkpoint.background import Saving, destroy, failing, ranks_of, unheard
from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, tensor_name
from lpq.checkpoint.finding import REPLACED, step_name
from lpq.checkpoint.info import pickled
from lpq.checkpoint.model import PREFIX, Model, is_shared
from lpq.checkpoint.optimizer import Named, Optimizers, optimizer_list, split
from lpq.checkpoint.ranks import ALIKE, CheckpointRanks, Meshes, quiet
from lpq.checkpoint.tensors import parts
from lpq.checkpoint.writing import CheckpointWriter
from lpq.files.claim import Claim
from lpq.files.disk import PARTIAL, place, resolved
from lpq.files.manifest import DESCRIPTION, EXTRA, is_ours
from lpq.nn.first_argument import check_whole
from lpq.registry.warning import warn
from lpq.torch_private.distributed import device_types


@model_first
def save(
    model: nn.Module,
    directory: str | Path,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save the model, its policy and its optimizer as ``directory/step-00000100``; return that path.

    All ranks call it, or the ranks of ``process_group``. If the model is whole on each rank (no DTensor gives each a
    part, as with ``DistributedDataParallel``), rank 0 calls it alone. A checkpoint in the same place is replaced once
    the new one is whole. While another job saves it, it is refused.

    Args:
        model: The model, sharded or not.
        directory: The directory of the run. Without ``step`` it is the checkpoint itself.
        optimizer: The optimizer, or a sequence of several.
        step: The number of the step, from 0 on.
        extra: Other data that the run needs (a scheduler's state, the position in the data), if ``torch.load(…,
            weights_only=True)`` can read it. The first rank's is kept.
        keep: The number of whole checkpoints of this run that stay, up to this one. The others are removed. None: all
            stay.
        process_group: The ranks over which the model lies; None: all ranks.
    """
    ranks, target = _agreed(model, "saves", directory, step, keep, process_group)
    with ranks.error_context(failing(target)), quiet():
        state, writer = _prepare(model, target, optimizer, step, extra, keep, ranks)
        try:
            dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=not ranks.many)
        finally:
            writer.release()
    return target


@model_first
def save_async(
    model: nn.Module,
    directory: str | Path,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Save as ``save`` does, but return once all is copied to the CPU's memory: training may go on while it is written.

    It counts as saved when ``Saving.wait`` returns; wait for one before the next begins. An error in one that nobody
    waits for is a warning in ``Saving.done``, at the next save or at the process's end.

    Args:
        model: The model, sharded or not.
        directory: The directory of the run. Without ``step`` it is the checkpoint itself.
        optimizer: The optimizer, or a sequence of several.
        step: The number of the step, from 0 on.
        extra: As for ``save``.
        keep: As for ``save``.
        process_group: The ranks over which the model lies: a group with gloo, over which nothing else talks meanwhile.
            None: all ranks, which get a group of their own, so that it does not matter over what, and when, training
            talks.
    """
    ranks, target = _agreed(model, "saves in the background", directory, step, keep, process_group)
    with ranks.error_context(failing(target)), quiet():
        ranks.all(lambda: _check_talk(Model(model), ranks))
        state, writer = _prepare(model, target, optimizer, step, extra, keep, ranks)
        group = None
        try:
            ranks.all(lambda: writer.copy(state))
            if ranks.group is None and dist.is_initialized():
                group = dist.new_group(ranks.names, backend="gloo", use_local_synchronization=not ranks.many)
            future = dcp.async_save(state, storage_writer=writer, process_group=ranks.group or group)
        except BaseException:
            writer.release()
            destroy(group)
            raise
    return Saving(target, cast("Future[Any]", future), ranks, group, writer.release)


def _agreed(
    model: nn.Module, does: str, directory: str | Path, step: int | None, keep: int | None,
    group: dist.ProcessGroup | None,
) -> tuple[CheckpointRanks, Path]:  # fmt: skip
    """The ranks that save, and the path that the checkpoint will have."""
    ranks = ranks_of(group, is_shared(model, replicas=False), does, first=True)
    with ranks.error_context("nothing is saved"):
        return ranks, ranks.each(lambda: _target(place(directory, "directory"), step, keep))


def _target(directory: Path, step: int | None, keep: int | None) -> Path:
    """The path that the checkpoint will have."""
    check_whole("save", 0, CheckpointError, step=0 if step is None else step)
    if keep is not None and (step is None or type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r}: it is how many checkpoints of a run stay, at least 1, and needs step=")
    return directory / step_name(step) if step is not None else directory


class _Content(NamedTuple):
    """The data to save."""

    state: dict[str, dict[str, Tensor]]
    """The tensors by model and optimizer, as DCP's own tools expect it."""
    small: dict[str, bytes]
    """The files to write beside DCP's."""
    shapes: list[str]
    """The names and shapes of the tensors."""
    meshes: Meshes
    optimizers: list[str]
    """The kind of each."""
    description: Description
    memories: dict[str, Tensor]


def _prepare(
    model: nn.Module,
    target: Path,
    optimizer: Optimizers,
    step: int | None,
    extra: Any,
    keep: int | None,
    ranks: CheckpointRanks,
) -> tuple[dict[str, dict[str, Tensor]], CheckpointWriter]:
    """Collect the data to save, and make sure that all ranks save the same checkpoint."""
    for text in dict.fromkeys(text for failed in ranks.all(unheard) for text in failed):
        warn(f"{text} (nobody called Saving.wait)", CheckpointWarning)
    content = ranks.each(lambda: _collected(model, optimizer, step, extra, ranks))
    ranks.check_alike(str(target.absolute()), content.meshes, content.optimizers)
    differ = "the ranks hold different layers, quantizers, recipes or steps, and a checkpoint describes one model"
    ranks.equal(content.description.lines(), differ, "Call lpq.set_step and lpq.checkpoint.save alike on all ranks")
    ranks.equal(content.shapes, "the ranks hold different tensors, and a checkpoint is of one model", ALIKE)
    if ranks.many:  # they may have had other inputs; as after a step, the largest statistics count
        every = [*ranks.exchange(content.memories).values()]
        for name in content.memories:
            combined = torch.stack([memories[name] for memories in every]).amax(0)
            content.state["model"][name.removeprefix(PREFIX)] = combined
    where = resolved(target)
    claim = ranks.each(lambda: _claimed(where, step) if ranks.rank == 0 else None)
    return content.state, CheckpointWriter(where, content.small, keep, claim)


def _collected(
    model: nn.Module, optimizer: Optimizers, step: int | None, extra: Any, ranks: CheckpointRanks
) -> _Content:
    view = Model(model)
    tensors, module_extra = view.state()
    names = {id(tensor): name.removeprefix(PREFIX) for name, tensor in tensors.items()}
    optimizers = [Named(one, names) for one in optimizer_list(optimizer)]
    theirs, rest = split(optimizers)
    every = {**tensors, **theirs}
    description = view.describe(every, step)
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in every.items():
        for part, value in parts(name, tensor).items():
            side, _, within = part.partition(".")
            state.setdefault(side, {})[within] = value
    beside = {"extra": extra, "model": module_extra, "optimizer": rest if optimizer is not None else None}
    memories = {name: memory.detach().cpu() for name, memory in view.memories().items() if name in tensors}
    shapes = sorted(f"{tensor_name(name)} {list(tensor.shape)}" for name, tensor in every.items())
    small = {DESCRIPTION: description.json(), EXTRA: pickled(beside) if ranks.rank == 0 else b""}
    kinds = [one.kind for one in optimizers]
    return _Content(state, small, shapes, view.meshes(replicas=ranks.many), kinds, description, memories)


def _claimed(target: Path, step: int | None) -> Claim:
    """Take the right to write the checkpoint. It replaces nothing, or another checkpoint."""
    if target.name.endswith(PARTIAL):
        raise CheckpointError(f"{target} has the name of an unfinished one, which load refuses: give another name")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, and a checkpoint is a directory: give another path")
    if not target.exists() or not any(target.iterdir()):
        return Claim.take(target)
    if not is_ours(target):
        remedy = "give step= to save one in it, or another directory" if step is None else "give another directory"
        raise CheckpointError(f"{target} is there, and is no checkpoint that could be replaced: {remedy}")
    aside = target.with_name(target.name + REPLACED)
    if os.path.lexists(aside) and not is_ours(aside):
        raise CheckpointError(f"{aside}, where the one that it replaces is kept meanwhile, is not lpq's: move it away")
    if target.samefile(os.curdir):
        raise CheckpointError(
            f"{target} is the current directory, and the checkpoint in it would be replaced as a whole: give step=, or "
            "save from another directory"
        )
    return Claim.take(target)


def _check_talk(model: Model, ranks: CheckpointRanks) -> None:
    """Make sure that the ranks can talk on the CPU while they write, and that training does not in the same group."""
    if not dist.is_gloo_available():
        raise CheckpointError("save_async needs gloo, which this PyTorch was built without: use lpq.checkpoint.save")
    if ranks.group is None:
        return
    remedy = 'pass one that is for this alone, dist.new_group(ranks, backend="gloo")'
    if torch.device("cpu") not in device_types(ranks.group):
        raise CheckpointError(f"save_async talks on the CPU, and process_group has no backend for it: {remedy}")
    if ranks.group is dist.group.WORLD or any(group is ranks.group for group in model.groups("cpu")):
        raise CheckpointError(f"training talks over process_group, and would while it is written: {remedy}")
