"""The tensors of a model that is here: however it is converted, stored, compiled or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.model import PREFIX, Model
from lpq.checkpoint.tensors import here, parts, whole
from lpq.engines.entries import FileEntry, Multiplied, Pieces, Stored, is_quantized
from lpq.engines.experts import Stacks, left_modules, split, states_of
from lpq.engines.intended import stored_side
from lpq.nn import Layer
from lpq.nn.expert_stacks import renamed
from lpq.nn.names import plain_name
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

RECORD = "lpq_input_amax"
"""Where a model that was imported keeps the amax of the inputs of its layers, by name, for the next export."""


def entries(model: Model, dtype: torch.dtype | None, stacks: Stacks) -> list[FileEntry]:
    """The parameters and persistent buffers of a model, each once, without states of quantizers. ``dtype``: the dtype
    in which it computes; None: the dtype in which FSDP2 gathers, or else the dtype of its weights."""
    state, _ = model.state()
    layers = {PREFIX + f"{name}.weight".lstrip("."): (name, layer) for name, layer in model.layers()}
    aliases, tied = model.aliases(), model.tied()
    memories, gathered = model.memories(), gathered_dtypes(model.module)
    amaxes = model.module.__dict__.get(RECORD, {})
    apart = memories.keys() | {f"{PREFIX}{name}" for name, stack in stacks.items() if stack.is_split}
    in_files = renamed(model.module, [key.removeprefix(PREFIX) for key in state if key not in apart])
    by_tensor: dict[int, list[FileEntry]] = {}
    for key, tensor in state.items():
        name = key.removeprefix(PREFIX)
        if name in aliases or key in memories:
            continue  # tied: an engine ties it, too
        local: Any = here(key, tensor)
        layer, shared, side = layers.get(key), name in tied, stored_side(name, local)
        stored = None if side is None else Stored(side, local.row.dtype)
        product = _multiplied(*layer, local, amaxes) if layer is not None and not shared else None
        file_dtype = dtype or (gathered.get(id(layer[1])) if layer is not None else None) or local.dtype
        file_dtype = file_dtype if local.is_floating_point() else local.dtype
        entry = FileEntry(name, tuple(tensor.shape), file_dtype, partial(_gather, key, tensor), product, stored)
        parts_of_stack = None if shared else split(entry, stacks, amaxes)
        if parts_of_stack is not None:
            by_tensor[id(tensor)] = parts_of_stack
        elif stored is not None and local.dim() > 2:
            raise CheckpointError(
                f"{name} is a stack that is stored as {stored.side}, and engines have no names for its matrices: load "
                "a checkpoint of it into a model that was not converted with weights='quantized', and export that"
            )
        else:
            by_tensor[id(tensor)] = [entry if product is not None else replace(entry, name=in_files.get(name, name))]
    return [entry for own in by_tensor.values() for entry in own]


def check_ties(model: Model) -> None:
    """Refuse a model of transformers that ties other weights than its configuration, by which engines tie."""
    of_config = getattr(model.module, "get_expanded_tied_weights_keys", None)
    if of_config is None:
        return
    by_config = {plain_name(name): plain_name(other) for name, other in of_config(all_submodels=True).items()}
    tensors, aliases = model.tensors(), model.aliases()
    for name, other in {**by_config, **aliases}.items():
        tied, expected = (one.get(name, name) == one.get(other, other) for one in (aliases, by_config))
        if tied != expected and {name, other} <= tensors.keys():
            remedy = f"give {name} a tensor of its own" if tied else "call model.tie_weights()"
            raise CheckpointError(
                f"{name} and {other} are {'one weight' if tied else 'two weights'} in the model, and not by its "
                f"configuration, by which engines build it: set model.config.tie_word_embeddings = {tied}, or {remedy}"
            )


def unquantized(model: nn.Module, quantized: set[str], stacks: Stacks) -> Iterator[str]:
    """The modules that an engine takes for linear layers, and that are not in this set: all with a matrix as weight,
    and modules with experts that are no layers to engines."""
    yield from left_modules(stacks)
    rest = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)
        if matrix and plain_name(name) not in quantized:
            rest.append(f"{plain_name(name)}.weight")
    # vLLM looks for the names in files, and transformers for the names of modules
    yield from (name.removesuffix(".weight") for name in (*rest, *renamed(model, rest).values()))


def _multiplied(name: str, layer: Layer, local: Tensor, amaxes: Mapping[str, Tensor]) -> Multiplied | None:
    recipe = layer.recipe
    is_matrix = local.dim() == 2 and not layer.transposed  # else experts in one tensor, see lpq.engines.experts
    if recipe is None or not is_matrix or not (is_quantized(recipe) or isinstance(local, QuantizedTensor)):
        return None
    return Multiplied.by(recipe, name, states_of(layer), amaxes.get(name))


def _gather(key: str, tensor: Tensor) -> Pieces:
    pieces = parts(key, tensor)
    row = f"{key}.row."
    if isinstance(local_part(tensor), QuantizedTensor):
        return {name.removeprefix(row): whole(part) for name, part in pieces.items() if name.startswith(row)}
    return {"": whole(pieces[key])}


def gathered_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """In which dtype FSDP2 gathers the weights of layers, by their ids."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return {}
    from lpq.torch_private.fsdp import outermost, sites

    return {id(module): site.dtype for module, site in sites(outermost(model), "weight").items()}
