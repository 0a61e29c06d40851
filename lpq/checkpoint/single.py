"""One file for a whole model: ``torch.load(path, weights_only=True)`` reads it, with ordinary names and shapes.

The file is ``{"model": tensors by name, "lpq": their description}``. A quantized weight is in it as its buffers
(``layer.weight.row.data`` …), with its quantizer as text; or, decoded, as an ordinary tensor that any model loads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpq.checkpoint import pickles
from lpq.checkpoint.argument_order import model_first
from lpq.checkpoint.background import ranks_of
from lpq.checkpoint.description import Description, check_fields
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.info import Info, pickled
from lpq.checkpoint.matching import Match, check_complete, match
from lpq.checkpoint.model import PREFIX, Model, is_extra, is_shared
from lpq.checkpoint.ranks import ALIKE, CheckpointRanks
from lpq.checkpoint.tensors import copy, decoded, described, parts, whole
from lpq.files.claim import whole_file
from lpq.files.disk import place
from lpq.files.safetensors import TensorKind


def write_file(
    model: nn.Module, path: str | Path, decode: bool, process_group: dist.ProcessGroup | None
) -> tuple[Path, Description]:
    """Write the whole model into one file, as ``lpq.export(model, path, layout="lpq")`` describes it."""
    ranks = ranks_of(process_group, is_shared(model, replicas=False), "exports", first=True)
    with ranks.error_context("nothing is exported"):
        target = ranks.each(lambda: _place(path))
    with ranks.error_context(f"nothing is exported to {target}"):
        as_one = f"{target.absolute()} in the layout lpq{', decoded' if decode else ''}"
        ranks.check_alike(as_one, ranks.each(lambda: Model(model).meshes(ranks.many)), ())
        description, pieces, other = ranks.each(lambda: _collected(model, decode))
        ranks.equal(description.lines(), "the ranks hold different models, and the file is of one", ALIKE)
    complete: dict[str, Tensor] = {}
    for name, part in pieces:
        gathered = whole(decoded(part) if decode else part)
        if ranks.rank == 0:
            complete[name] = gathered.cpu()
    with ranks.error_context(f"nothing is exported to {target}"):
        ranks.first(lambda: _write(target, complete, other, description))
    return target, description


@model_first
def import_file(model: nn.Module, path: str | Path, *, process_group: dist.ProcessGroup | None = None) -> Info:
    """Load a file of ``lpq.export(…, layout="lpq")``, or any with a state dict, into the model, however it is sharded.

    All ranks that share the model call it, or the ranks of ``process_group``. A weight that is stored quantized takes
    one that was saved by the same quantizer, or encodes one that was saved in high precision. A weight in high
    precision takes the decoded values of a quantized one, cast to its own dtype as ``load_state_dict`` does it. The
    policy is not compared.

    Args:
        model: The model to load into.
        path: The file. One that was changed after it was saved is refused.
        process_group: The ranks over which the model lies; None: all ranks.
    """
    ranks = ranks_of(process_group, is_shared(model), "imports")
    with ranks.error_context("nothing is imported"):
        source = ranks.each(lambda: place(path))
    with ranks.error_context(f"{source} cannot be imported"):
        ranks.check_alike(str(source), ranks.each(lambda: Model(model).meshes()), ())
        view = Model(model)
        view.own_memories()
        description, tensors, other, result = ranks.each(lambda: _prepare(source, view, ranks))
        ranks.equal([*result.to_encode], "the ranks read different files, or hold different models", ALIKE)
    for name, target in result.targets.items():
        copy(target, tensors[name])
    result.finish()
    view.forget(view.starting(result.absent))
    view.set_extra_state(other)
    return Info(source, description.step, None, description)


def _place(path: str | Path) -> Path:
    """The place of a file. A directory there would be noticed only when the file gets its name."""
    target = place(path)
    if target.is_dir():
        raise CheckpointError(f'{target} is a directory, and layout="lpq" writes a file: give the name of one in it')
    return target


def _collected(model: nn.Module, decode: bool) -> tuple[Description, list[tuple[str, Tensor]], dict[str, Any]]:
    """The description, the tensors to gather and the values of ``get_extra_state``; checked before any is gathered."""
    view = Model(model)
    tensors, extra = view.state()
    pickled({"model": extra})
    description = view.describe(tensors, None)
    if decode:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in description.memories}
        description = replace(description, quantized={}, stored=(), memories=())
    saved = [(name, tensor, parts(name, tensor)) for name, tensor in tensors.items()]
    pieces = [piece for name, tensor, own in saved for piece in ([(name, tensor)] if decode else own.items())]
    return description, pieces, extra


def _write(target: Path, tensors: dict[str, Tensor], other: dict[str, Any], description: Description) -> None:
    model = {name.removeprefix(PREFIX): value for name, value in {**tensors, **other}.items()}
    with whole_file(target) as file:
        torch.save({"model": model, "lpq": description.data()}, file)


def _prepare(
    source: Path, view: Model, ranks: CheckpointRanks
) -> tuple[Description, dict[str, Tensor], dict[str, Any], Match]:
    """Find everything that can be wrong, before anything is written."""
    content = _opened(source, ranks)
    ours = "lpq" in content and not isinstance(content["lpq"], Tensor)  # a model's own tensor may have that name
    if ours:
        check_fields("it", content, {"model": (dict,), "lpq": (dict,)})
    description = Description.read(content["lpq"]) if ours else Description()
    model = content["model"] if ours else content
    if not all(isinstance(name, str) for name in model):
        raise CheckpointError("it holds no state dict")
    saved = {PREFIX + name: value for name, value in model.items()}
    quantized = dict(description.quantized)
    available: dict[str, Tensor] = {}
    for name, value in saved.items():
        if isinstance(value, Tensor) and not is_extra(name):
            # A state dict that torch saved has quantized tensors in it.
            quantized.update({name: entry} if (entry := described(value)) is not None else {})
            available.update(parts(name, value))
    description.require(description.stored)
    tensors, _ = view.state()
    kinds = {name: TensorKind.of(tensor) for name, tensor in available.items()}
    result = match(tensors, kinds, quantized, decodable=quantized, cast=True)
    check_complete(result, available, quantized, may_lack=view.memories(), may_ignore=description.memories)
    extra = {name: value for name, value in saved.items() if is_extra(name)}
    view.check_extra_state(extra)
    return description, available, extra, result


def _opened(source: Path, ranks: CheckpointRanks) -> dict[str, Any]:
    """Return the content of a file. Every rank compares the checksums of a share of it."""
    if source.is_dir():
        raise CheckpointError("it is a directory; if that is a checkpoint, lpq.checkpoint.load loads it")
    if not source.exists():
        raise CheckpointError('there is no such file; lpq.export(model, path, layout="lpq") writes one')
    content = pickles.load(source, share=slice(ranks.rank, None, ranks.size), mmap=True)
    if not isinstance(content, dict):
        raise CheckpointError("it holds no state dict")
    return content
