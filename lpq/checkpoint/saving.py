"""Saving: written beside its place by all ranks, and given its name once every file of it is on the disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp

from lpq.checkpoint.background import Saving, destroy, failing, unheard
from lpq.checkpoint.claim import Claim
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, listed, shown
from lpq.checkpoint.files import PARTIAL
from lpq.checkpoint.finding import step_name
from lpq.checkpoint.info import pickled
from lpq.checkpoint.manifest import DESCRIPTION, EXTRA, is_ours
from lpq.checkpoint.model import Model
from lpq.checkpoint.optimizer import Optimizers, OptimizerState
from lpq.checkpoint.ranks import Ranks
from lpq.checkpoint.tensors import parts
from lpq.checkpoint.writing import Writer


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Save the model, its policy and its optimizer (or several) as ``directory/step-00000100``; return that path.

    All ranks call it. Without ``step``, ``directory`` itself is the checkpoint. ``extra`` is whatever else the run
    needs (a scheduler's state, the position in the data): rank 0's is kept, if ``torch.load(…, weights_only=True)`` can
    read it. ``keep``: of this run only so many whole checkpoints stay, up to this one; the others are removed. A
    checkpoint in the same place is replaced once the new one is whole. While another job saves it, it is refused.
    """
    ranks, target = Ranks(), _target(Path(directory), step, keep)
    with ranks.saying(failing(target)), _quiet():
        state, writer = _prepare(target, model, optimizer, step, extra, keep, ranks)
        try:
            dcp.save(state, storage_writer=writer, no_dist=not ranks.many)
        finally:
            writer.release()
    return target


def save_async(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
) -> Saving:
    """As ``save``, but return once all is copied to the CPU's memory: training may go on while it is written.

    It counts as saved when ``Saving.wait`` returns; wait for one before the next begins. What goes wrong with one that
    nobody waits for is a warning in ``Saving.done``, at the next save or at the process's end. The ranks that write
    talk over gloo, in a group of their own, so that it does not matter over what, and when, training talks.
    """
    ranks, target = Ranks(), _target(Path(directory), step, keep)
    with ranks.saying(failing(target)), _quiet():
        ranks.all(_check_gloo)
        state, writer = _prepare(target, model, optimizer, step, extra, keep, ranks)
        group = None
        try:
            ranks.all(lambda: writer.copy(state))
            group = dist.new_group(backend="gloo") if ranks.many else None
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
        except BaseException:
            writer.release()
            destroy(group)
            raise
    return Saving(target, cast("Future[Any]", future), ranks, group, writer.release)


def _target(directory: Path, step: int | None, keep: int | None) -> Path:
    """Where the checkpoint will be."""
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"a step is a whole number from 0 on, not {step!r}")
    if keep is not None and (step is None or type(keep) is not int or keep < 1):
        raise ValueError(f"keep={keep!r}: it is how many checkpoints of a run stay, at least 1, and needs step=")
    return directory / step_name(step) if step is not None else directory


def _prepare(
    target: Path,
    model: nn.Module,
    given: Optimizers,
    step: int | None,
    extra: Any,
    keep: int | None,
    ranks: Ranks,
) -> tuple[dict[str, dict[str, Tensor]], Writer]:
    """Collect what is to be saved, and make sure that all ranks mean the same."""
    state: dict[str, dict[str, Tensor]] = {}
    small: dict[str, bytes] = {}
    held: list[str] = []
    claims: list[Claim] = []

    def collect() -> tuple[str, str, str, dict[str, Tensor]]:
        seen = Model(model)
        tensors, module_extra = seen.state()
        names = {id(tensor): name.removeprefix("model.") for name, tensor in tensors.items()}
        theirs, rest = OptimizerState(given, names).split()
        every = {**tensors, **theirs}
        description = seen.describe(every, step)
        state.update(_nested(part for name, tensor in every.items() for part in parts(name, tensor).items()))
        beside = {"extra": extra, "model": module_extra, "optimizer": rest if given is not None else None}
        small.update({DESCRIPTION: description.json(), EXTRA: pickled(beside) if ranks.rank == 0 else b""})
        memories = {name: memory.detach().cpu() for name, memory in seen.memories().items() if name in tensors}
        held.extend(sorted(f"{shown(name)} {list(tensor.shape)}" for name, tensor in tensors.items()))
        described, holds = _digest(small[DESCRIPTION]), _digest(repr(held).encode())
        return str(target.absolute()), described, holds, memories if ranks.many else {}

    def begin() -> None:
        _check_place(target, step)
        target.parent.mkdir(parents=True, exist_ok=True)
        claims.append(Claim.take(target.with_name(target.name + PARTIAL)))

    for said in dict.fromkeys(said for failed in ranks.all(unheard) for said in failed):
        warnings.warn(f"{said} (nobody called Saving.wait)", CheckpointWarning, stacklevel=3)
    found = ranks.all(collect)
    if len(places := {place for place, *_ in found}) > 1:
        said = ", ".join(sorted(places))
        raise CheckpointError(
            f"the ranks would write it to different places, and it would be whole in none: {said}; pass the same "
            "directory on all ranks, one that all of them see"
        )
    if len({description for _, description, _, _ in found}) > 1:
        raise CheckpointError(
            "the ranks hold different layers, quantizers, recipes or steps, and a checkpoint describes one model: call "
            "lpq.set_step and lpq.checkpoint.save alike on all ranks"
        )
    if len({holds for _, _, holds, _ in found}) > 1:
        _refuse_others(ranks.all(lambda: held))
    for name in found[0][3]:  # ranks may have seen different inputs; as after a step, the largest statistics count
        combined = torch.stack([memories[name] for *_, memories in found]).amax(0)
        state["model"][name.removeprefix("model.")] = combined
    ranks.first(begin)
    return state, Writer(target, small, keep, next(iter(claims), None))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse_others(held: list[list[str]]) -> None:
    """Say which tensors one rank has and another one has not: what is loaded would lack them, or mix two of them."""
    for rank, (mine, theirs) in enumerate((held[0], other) for other in held):
        if mine != theirs:
            only, others = (
                listed([n for n in a if n not in set(b)]) or "none" for a, b in ((mine, theirs), (theirs, mine))
            )
            raise CheckpointError(
                f"the ranks hold different tensors: rank 0 has {only}, and rank {rank} has {others} in their place. A "
                "checkpoint is of one model: build it alike on all ranks"
            )


def _check_place(target: Path, step: int | None) -> None:
    """Make sure that what the checkpoint will replace, if anything, is one."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, and a checkpoint is a directory: give another path")
    if target.exists() and not is_ours(target):
        remedy = "give step= to save one in it, or another directory" if step is None else "give another directory"
        raise CheckpointError(f"{target} is there, and is no checkpoint that could be replaced: {remedy}")


def _nested(flat: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """By model and optimizer, as DCP's own tools expect it."""
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat:
        side, _, rest = name.partition(".")
        nested.setdefault(side, {})[rest] = tensor
    return nested


def _check_gloo() -> None:
    if not dist.is_gloo_available():
        raise CheckpointError("save_async needs gloo, which this PyTorch was built without: use lpq.checkpoint.save")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
