"""Importing experts: files have a layer for each expert, a model holds all experts in stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lpq.checkpoint.errors import CheckpointError
from lpq.engines.reading import Quantized
from lpq.formats import Quantizer, Storage
from lpq.formats.sections import cat, stacked
from lpq.nn.expert_stacks import ExpertStack, Names, stacks_in_files
from lpq.nn.sharded_weights import replace_parameter
from lpq.operations.derived_operands import derives_col
from lpq.registry.showing import listed


def stacks_in_model(model: nn.Module, layers: Mapping[str, Quantized]) -> dict[str, ExpertStack]:
    """The stacks for whose experts the files have quantized layers, by the names of their parameters."""
    stacks = {}
    for stack in stacks_in_files(model):
        there = [layer for layer in stack.layers if layer in layers]
        if not there:
            continue
        if absent := [layer for layer in stack.layers if layer not in layers]:
            raise CheckpointError(
                f"the files have {listed(there)} quantized and not {listed(absent)}, and {stack.name} of the model "
                "holds all of them in one tensor"
            )
        kinds = {(id(layers[layer].scheme), id(layers[layer].inputs)): layer for layer in there}
        if len(kinds) > 1:
            raise CheckpointError(
                f"the files have {listed([*kinds.values()])} in several formats, and {stack.name} of the model holds "
                "them in one tensor"
            )
        stacks[stack.name] = stack
    return stacks


def by_module(layers: Mapping[str, Quantized], stacks: Mapping[str, ExpertStack]) -> dict[str, Quantized]:
    """Return the quantized layers by the names of the model's modules; one module holds many experts."""
    holder_of = {layer: stack.holder_name for stack in stacks.values() for layer in stack.layers}
    modules: dict[str, Quantized] = {}
    for layer, quantized in layers.items():
        name = holder_of.get(layer, layer)
        before = modules.setdefault(name, quantized)
        if (before.scheme, before.inputs) != (quantized.scheme, quantized.inputs):
            raise CheckpointError(
                f"the files have {before.name} and {layer} in several formats, and {name} of the model has one recipe"
            )
    return modules


def store_quantized(stacks: Iterable[ExpertStack]) -> None:
    """Store these stacks of converted experts of Hugging Face's models quantized, as files have codes for them."""
    for stack in stacks:
        if stack.recipe is not None:  # a plugin may have replaced the experts
            w = stack.recipe.w
            tensor = w.quantize(stack.weight.detach(), col=not derives_col(w), stack=True)
            replace_parameter(stack.holder, stack.key, tensor)


def operand_of(names: Names, read_layer: Callable[[str], Storage]) -> Storage:
    """The stack of the operands of all experts."""
    return stacked([_joined(layers, [read_layer(layer) for layer in layers]) for layers in names])


def _joined(layers: Sequence[str], operands: Sequence[Storage]) -> Storage:
    if len(operands) == 1:
        return operands[0]
    operand = cat(operands, 0)
    if operand is None:
        raise CheckpointError(
            f"{listed(layers)} are one matrix of the model, and they do not join: their scales of the whole differ, or "
            "blocks would have rows of both. Load them with weights=None"
        )
    return operand


def static_key(x: Quantizer) -> str | None:
    """The key of the static amax of whole inputs in the state of their quantizer; None if it has no such amax."""
    side = x.side("row")
    if not side.static or [stat.of_all for stat in side.stats if side.recalls(stat)] != [True]:
        return None
    prefix = next(name for name, branch in x.state_branches().items() if branch == side)
    (buffer,) = side.state
    return prefix + buffer.name


@torch.no_grad()
def make_static(stack: ExpertStack, amaxes: dict[str, Tensor]) -> None:
    """Have experts be static by the amaxes of their inputs in the files, which are taken out, if their recipe is."""
    key = static_key(stack.recipe.x) if stack.recipe is not None else None
    if key is None or any(layer not in amaxes for layer in stack.layers):
        return
    place = stack.holder.states(stack.key)["x"][key]
    for number, layers in enumerate(stack.names):  # layers of one matrix have one input
        place[number].copy_(torch.stack([amaxes.pop(layer).reshape(()) for layer in layers]).amax())
    stack.holder.passes.forget()
