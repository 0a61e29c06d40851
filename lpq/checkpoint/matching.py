"""Matching a checkpoint's tensors with the tensors to fill, decided before anything is written.

A tensor takes its saved values bit for bit, if it is stored as it was saved. A weight that is stored quantized also
takes a weight that was saved in high precision, and encodes it. A weight in high precision takes the fp32 master of a
weight that was stored quantized, or the decoded values of a frozen one, which has no master. Anything else is an error
that names the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lpq.checkpoint.errors import CheckpointError, tensor_name
from lpq.checkpoint.optimizer import SavedTensors
from lpq.checkpoint.tensors import copy, described, encode, parts, plain_like, stored_like
from lpq.distributed.shard import touched
from lpq.operations.inputs import DTYPES
from lpq.registry.showing import listed

BY_VALUE = 'or move its values: lpq.export(…, layout="lpq", decode=True), then lpq.checkpoint.import_file'
"""The remedy where a checkpoint and a model store a tensor in ways that do not fit."""


@dataclass
class Match:
    """The places into which a checkpoint's tensors go."""

    targets: dict[str, Tensor] = field(default_factory=dict)
    """The tensors to fill, by their names in the checkpoint: the model's own, or those that hold values to encode."""
    to_encode: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By name the tensors that are stored quantized, each with the values from which it is encoded. Statistics cover
    the whole tensor, so that all ranks encode alike."""
    to_copy: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors in high precision, each with the one whose values it takes, decoded, in its own dtype."""
    partial: list[str] = field(default_factory=list)
    """The quantized tensors in the checkpoint of which one operand, or the master, is enough."""
    in_place: list[Tensor] = field(default_factory=list)
    """The tensors that ``targets`` or ``to_copy`` fills in place."""
    absent: list[str] = field(default_factory=list)
    """The tensors of which the checkpoint has nothing."""

    @torch.no_grad()
    def finish(self) -> None:
        """Copy and encode once the targets are filled, and count the writes to all changed tensors."""
        for target, source in self.to_copy:
            copy(target, source)
        encode(self.to_encode.values())
        for tensor in [*self.in_place, *(tensor for tensor, _ in self.to_encode.values())]:
            touched(tensor)


def match(
    tensors: Mapping[str, Tensor],
    saved: SavedTensors,
    quantized: Mapping[str, Any],
    *,
    masters: Mapping[str, str] | None = None,
    decodable: Collection[str] = (),
    cast: bool = False,
) -> Match:
    """Find for each tensor its saved tensor. ``masters``: the names of the saved masters, by the names of their
    weights. ``decodable``: the names of the tensors that were saved quantized and may be decoded. ``cast``: an ordinary
    tensor may have been saved in another dtype.
    """
    result = Match()

    def fill(name: str, tensor: Tensor, *, exact: bool) -> None:
        for part, target in parts(name, tensor).items():
            _check(part, target, saved, exact=exact)
            result.targets[part] = target

    for name, tensor in tensors.items():
        theirs, mine = quantized.get(name), described(tensor)
        if theirs is None and name not in saved:
            result.absent.append(name)
            continue
        if mine is not None and theirs is None:  # encode values that were saved in high precision
            shape, dtype = saved[name]
            _check_shape(name, shape, tensor.shape)
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{tensor_name(name)} was saved in {dtype}, and no format encodes that: cast it to float32 first"
                )
            result.targets[name] = values = plain_like(name, tensor, dtype)
            result.to_encode[name] = tensor, values
            continue
        result.in_place.append(tensor)
        result.partial += [name] if theirs is not None else []
        if mine is None and masters and name in masters:  # take the master of a weight that was stored quantized
            shape, dtype = saved[masters[name]]
            _check_shape(name, shape, tensor.shape)
            result.targets[masters[name]] = values = plain_like(name, tensor, dtype)
            result.to_copy.append((parts(name, tensor)[name], values))
        elif mine is None and theirs is not None and name in decodable:  # decode a weight that was stored quantized
            _check_shape(name, theirs["shape"], tensor.shape)
            stored = stored_like(name, tensor, theirs)
            fill(name, stored, exact=True)
            result.to_copy.append((parts(name, tensor)[name], stored))
        else:  # take it bit for bit
            _check_storage(name, theirs, mine)
            fill(name, tensor, exact=not cast or mine is not None)
    return result


def check_complete(
    result: Match, saved: Collection[str], quantized: Mapping[str, Any], may_lack: Collection[str],
    may_ignore: Collection[str], whose: str = "model",
) -> None:  # fmt: skip
    """Make sure that no tensor is left over on either side except those that may be, as quantizers' memories."""
    remedy = f"Make the {whose} as it was when it was saved"
    absent = [tensor_name(name) for name in result.absent if name not in may_lack]
    if absent:
        raise CheckpointError(f"it has nothing for these tensors of the {whose}: {listed(absent)}. {remedy}")
    rest = sorted(set(saved) - result.targets.keys() - set(may_ignore))
    unused = [name for name in rest if not any(name.startswith(f"{owner}.") for owner in result.partial)]
    if unused:
        owners = {part: name for name in quantized for part in unused if part.startswith(f"{name}.")}
        names = dict.fromkeys(tensor_name(owners.get(name, name)) for name in unused)
        raise CheckpointError(f"it has tensors for which the {whose} has no place: {listed([*names])}. {remedy}")


def _check_storage(name: str, theirs: Mapping[str, Any] | None, mine: Mapping[str, Any] | None) -> None:
    ours = mine["quantizer"] if mine is not None else "in high precision"
    saved = theirs["quantizer"] if theirs is not None else "in high precision"
    if ours != saved:
        raise CheckpointError(
            f"{tensor_name(name)} was saved as {saved}, and the model stores it "
            f"{'as ' if mine is not None else ''}{ours}: convert the model with the policy and the weights= that it "
            f"was saved with, and shard it so that its blocks stay whole; {BY_VALUE}"
        )
    if mine is None or theirs is None:
        return
    _check_shape(name, theirs["shape"], mine["shape"])
    absent = [d for d in mine["operands"] if d not in theirs["operands"]]
    if absent:
        raise CheckpointError(
            f"{tensor_name(name)} was saved without its {absent[0]} operand, which the model stores: convert the model "
            f"with the policy that it was saved with; {BY_VALUE}"
        )


def _check(name: str, target: Tensor, saved: SavedTensors, *, exact: bool) -> None:
    if name not in saved:
        raise CheckpointError(f"it lacks {tensor_name(name)}, a part of a tensor that it has")
    shape, dtype = saved[name]
    _check_shape(name, shape, target.shape)
    if exact and dtype != target.dtype:
        raise CheckpointError(
            f"{tensor_name(name)} was saved in {dtype} and is {target.dtype} in the model, and a checkpoint is loaded "
            f"bit for bit: give the model the dtype that it had, {BY_VALUE}"
        )


def _check_shape(name: str, theirs: Sequence[int], mine: Sequence[int]) -> None:
    if list(theirs) != list(mine):
        raise CheckpointError(
            f"{tensor_name(name)} was saved with shape {list(theirs)} and is {list(mine)} in the model: make the model "
            "with the sizes that were saved"
        )
