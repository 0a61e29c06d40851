"""Loading: judge first, on all ranks alike, then read in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader as dcp

from lpq.checkpoint.argument_order import model_first
from lpq.checkpoint.background import ranks_of
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning
from lpq.checkpoint.finding import WholeCheckpoint, find
from lpq.checkpoint.info import Info, read
from lpq.checkpoint.matching import Match, check_complete, match
from lpq.checkpoint.model import PREFIX, Model, is_shared
from lpq.checkpoint.optimizer import Loaded, Named, Optimizers, join, kind, master_name, optimizer_list, untrained
from lpq.checkpoint.ranks import ALIKE, quiet
from lpq.checkpoint.reading import CheckpointReader
from lpq.files.disk import place
from lpq.nn.first_argument import check_flags
from lpq.registry.showing import listed
from lpq.registry.warning import warn
from lpq.tensor.inference import normal_tensors


@model_first
def load(
    model: nn.Module,
    path: str | Path,
    optimizer: Optimizers = None,
    *,
    any_policy: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Info:
    """Load a checkpoint into the model and its optimizer, on any number of ranks; return its info.

    All ranks that share the model call it, or the ranks of ``process_group``. Every file is compared with the manifest
    before anything is written. The layers get the recipes that they had at the step of the checkpoint; call
    ``lpq.set_step`` in the loop as before.

    A run may go on with another ``weights=`` (the page on checkpoints has a table). Masters that have no place are left
    out, with a warning unless the checkpoint is loaded without an optimizer.

    Args:
        model: The model to load into, with the policy that it was saved with.
        path: A checkpoint, or the directory of a run. The last whole checkpoint of a run is loaded, and warnings name
            checkpoints that were refused and checkpoints of later steps.
        optimizer: The optimizer, or a sequence of several. One that took no step yet gets its state made.
        any_policy: Let the model keep a policy of its own. Statistics that its quantizers remember start anew where
            nothing was saved.
        process_group: The ranks over which the model lies; None: all ranks.
    """
    ranks = ranks_of(process_group, is_shared(model), "loads")
    with ranks.error_context("nothing is loaded"):
        source = ranks.each(lambda: place(path))
    with ranks.error_context(f"{source} cannot be loaded"):
        # These are compared first, as reading takes long.
        kinds, meshes = ranks.each(lambda: ([*map(kind, optimizer_list(optimizer))], Model(model).meshes()))
        ranks.check_alike(str(source), meshes, kinds)
    checkpoint = find(source, ranks)
    what = f"checkpoint {checkpoint.path} cannot be loaded"
    view = Model(model)
    view.own_memories()
    with ranks.error_context(what), view.recipes_stay_on_error(), normal_tensors():
        plan = ranks.each(lambda: _prepare(view, checkpoint, optimizer, any_policy))
        differ = "the ranks read different files under that name, or hold different models"
        ranks.equal([*plan.matches[0].to_encode], differ, ALIKE)
    reader = plan.reader
    state: dict[str, Any] = {name: target for match in plan.matches for name, target in match.targets.items()}
    with ranks.error_context(lambda: f"{what}, and the model is partly overwritten" if reader.begun else what), quiet():
        dcp.load(state, storage_reader=reader, process_group=ranks.group, no_dist=not ranks.many)
    for filled in plan.matches:
        filled.finish()
    view.forget(plan.fresh)
    view.set_extra_state(plan.beside["model"])
    encoded = dict(pair for filled in plan.matches for pair in filled.to_encode.values())
    for loaded in plan.loaded:
        loaded.apply(encoded)
    if dropped := [name for loaded in plan.loaded for name in loaded.dropped]:
        warn(
            f"checkpoint {checkpoint.path}: the fp32 masters of {len(dropped)} weights are left out "
            f"({listed(dropped)}). The weights are stored quantized, and this optimizer keeps no masters: wrap it in "
            "lpq.optim.MasterWeights before loading to go on from them",
            CheckpointWarning,
        )
    return plan.info


class _Job(NamedTuple):
    """A load that was judged: the reader, and the targets that it fills."""

    reader: CheckpointReader
    info: Info
    beside: dict[str, Any]
    matches: list[Match]
    """The targets in the model, and then in the optimizer, by their names in the index, which has no levels."""
    fresh: Mapping[str, Tensor]
    loaded: list[Loaded]


def _prepare(model: Model, source: WholeCheckpoint, optimizer: Optimizers, any_policy: bool) -> _Job:
    """Find everything that can be wrong, before anything is written."""
    check_flags("load", CheckpointError, any_policy=any_policy)
    info, beside = read(source)
    description = info.description
    description.require(description.stored)
    if not any_policy:
        model.check_policy(description)
        model.restore_recipes(description)
    reader = CheckpointReader(source.path, source.sizes)
    saved = reader.saved()
    tensors, _ = model.state()
    memories = model.memories()
    if any_policy:  # a history of another length belongs to another recipe
        saved = {n: kind for n, kind in saved.items() if n not in memories or kind.shape == memories[n].shape}
    names = {id(tensor): name.removeprefix(PREFIX) for name, tensor in tensors.items()}
    # A weight of a layer that is in several places has a master, and a place in an optimizer, by one of its names.
    one = {
        name: names[id(tensors[name])] if name in tensors else name.removeprefix(PREFIX)
        for name in description.quantized
    }
    masters = {name: key for name in description.quantized if (key := master_name(one[name])) in saved}
    ours = {name for name in saved if name.startswith(PREFIX)}
    unknown = untrained(beside["optimizer"], [*one.values()])
    frozen = {name for name in description.quantized if one[name] in unknown}
    in_model = match(tensors, saved, description.quantized, masters=masters, decodable=frozen)
    check_complete(in_model, ours, description.quantized, may_lack=memories, may_ignore=description.memories)
    model.check_extra_state(beside["model"])
    fresh = model.starting(in_model.absent)
    matches, loaded = [in_model], list[Loaded]()
    if optimizer is not None:  # judged last: a model that differs has an optimizer that does, and is the cause
        stored = {one[name] for name in masters}
        named = [Named(each, names) for each in optimizer_list(optimizer)]
        targets, loaded = join(named, beside["optimizer"], saved, stored, description.quantized)
        matches.append(in_optimizer := match(targets, saved, description.quantized))
        check_complete(in_optimizer, saved.keys() - ours, description.quantized, (), masters.values(), "optimizer")
    return _Job(reader, info, beside, matches, fresh, loaded)
