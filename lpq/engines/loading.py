"""Importing: the model of an engine's files becomes a model of lpq, for inference or to train it further."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpq import registry
from lpq.checkpoint.argument_order import model_first
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning
from lpq.checkpoint.model import PREFIX, Model
from lpq.checkpoint.ranks import CheckpointRanks
from lpq.distributed.shard import touched
from lpq.engines.intended import Intended, recipe_of, stored_side
from lpq.engines.loading_experts import by_module, make_static, operand_of, stacks_in_model, static_key, store_quantized
from lpq.engines.models import RECORD
from lpq.engines.names import CONFIG
from lpq.engines.reading import Files, Quantized
from lpq.files.disk import place
from lpq.formats import Storage
from lpq.nn import Layer, convert
from lpq.nn.conversion_plan import rule_names
from lpq.nn.expert_stacks import ExpertStack, Names, names_in_files, stacks_in_files
from lpq.nn.names import plain_name
from lpq.nn.sharded_weights import Weights, check_replaced
from lpq.nn.stateful_layer import stateful_layers
from lpq.operations import decode, remember
from lpq.operations.inputs import DTYPES
from lpq.operations.quantizing import quantize
from lpq.recipes import PolicyLike
from lpq.recipes.globs import exactly
from lpq.registry.showing import listed
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

CACHE = re.compile(r".*\.(k|v|q|kv)_scale|.*\.(k|v)_proj\.output_scale")
"""The names of scales of a KV cache, as others write them."""


@model_first
def load_quantized(
    model: nn.Module, path: str | Path, *, policy: PolicyLike | None = None, weights: Weights | None = "quantized"
) -> nn.Module:
    """Load a directory that ``lpq.export`` wrote, or another program in one of its layouts, into ``model``; return it.

    If the model is not converted yet, that is done: by ``policy``, or by recipes that multiply as an engine does in
    forward, and in bf16 backward, which is for inference and for adapters over frozen weights. Everything is judged,
    the policy too, before the model is converted and a value of the files is written. Shard it afterwards.

    Args:
        model: A model with the architecture of the files, whose own values are replaced. If it is converted already,
            its weights stay stored as they are.
        path: The directory.
        policy: The policy of a model that is not converted; None: the recipes that the files tell.
        weights: How weights are stored, as for ``lpq.convert``. ``"quantized"``: with the codes of the files, bit for
            bit; the recipe of each layer must then be one whose weights lie so. A column operand that does not follow
            from the row operand is encoded from what that decodes to, and masters of ``lpq.optim.MasterWeights`` begin
            there. ``"high_precision"`` or ``None``: weights get the decoded values, in their own dtype.
    """
    path = place(path)
    with CheckpointRanks(alone=True).error_context(f"{path} cannot be loaded"):
        files, view = Files(path), Model(model)
        there = {stack.name for stack in stacks_in_files(view.module) if stack.patterns} | files.tensors.keys()
        there |= {f"{name.rpartition('.')[0]}.weight" for name in files.tensors}  # of codes that are called otherwise
        if absent := [name for name in view.tensors() if name not in there]:
            files.rename(names_in_files(view.module, absent))
        layers = files.quantized()
        if not layers:
            raise CheckpointError(
                f"{CONFIG} describes quantized layers, and no tensor of the files is one of theirs: their names, the "
                "targets or what is ignored were changed"
            )
        stacks = stacks_in_model(view.module, layers)
        _check_model(view, layers, stacks)
        fresh = all(layer.recipe is None for layer in stateful_layers(model).values())
        rules = _rules(by_module(layers, stacks), rule_names(view.module)) if policy is None and fresh else policy
        job = _Job(files, view, layers, stacks, Intended.of(view, rules, weights, stacks))
        job.judge()
        if rules is not None:
            for stack in job.intended.experts:
                check_replaced(stack.name, stack.weight)
            convert(view.module, rules, weights=weights)
            store_quantized(job.intended.experts)
        job.fill()
        for layer in view.module.modules():
            if isinstance(layer, Layer) and layer.gather is not None:
                layer.gather.rounded = False  # its values come from the files
    return model


def _rules(layers: Mapping[str, Quantized], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A policy with a rule for all layers that lie alike. ``names``: all names of each module, by the first one."""
    alike: dict[tuple[int, int], tuple[Quantized, list[str]]] = {}
    for name, layer in layers.items():
        alike.setdefault((id(layer.scheme), id(layer.inputs)), (layer, []))[1].extend(names.get(name, [name]))
    return {"rules": [{"match": [*map(exactly, own)], "recipe": recipe_of(one)} for one, own in alike.values()]}


def _check_model(model: Model, layers: Mapping[str, Quantized], stacks: Mapping[str, ExpertStack]) -> None:
    for name, tensor in model.tensors().items():
        if isinstance(tensor, DTensor):
            raise CheckpointError(f"{name} is sharded: load the model first, and shard it then")
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device: call model.to_empty(…) first")
    linear = {plain_name(n) for n, m in model.module.named_modules() if isinstance(m, nn.Linear | Layer)}
    linear |= {layer for one in stacks.values() for layer in one.layers}
    if strange := [name for name in layers if name not in linear]:
        raise CheckpointError(
            f"the files have quantized weights of linear layers that the model has not: {listed(strange)}; build the "
            "model that was exported"
        )


@dataclass
class _Job:
    """The tensors of a model, each with its source in files."""

    files: Files
    model: Model
    layers: Mapping[str, Quantized]
    stacks: Mapping[str, ExpertStack]
    """The stacks of the model's experts, by the names of their parameters."""
    intended: Intended
    """The model as it will be when it is filled; it may not be converted yet."""
    operands: dict[str, Callable[[], Storage]] = field(default_factory=dict)
    """For each weight, by name, a function that reads its row operand, or the operand whose decoded value it gets. It
    is called when everything is checked, and again to fill the model, so that one operand is in memory at a time."""
    plain: list[tuple[str, int | None, str]] = field(default_factory=list)
    """Tensors in high precision: the name, the number of the part if it is not the whole, and the name of its
    source."""
    amaxes: dict[str, Tensor] = field(default_factory=dict)
    """The amax of inputs, by the name of a layer."""

    def judge(self) -> None:
        """Find what each tensor of the model gets; everything that can be wrong."""
        tensors = self._tensors()
        names: set[str] = set()
        filled: set[int] = set()
        for name, tensor in tensors.items():
            if (own := self._judge_tensor(name, tensor)) is not None:
                names |= own
                filled.add(id(tensor))
        if absent := [name for name, tensor in tensors.items() if id(tensor) not in filled]:
            raise CheckpointError(f"the files have nothing for these tensors of the model: {listed(absent)}")
        rest = [name for name in self.files.tensors if name not in names]
        if strange := [name for name in rest if not CACHE.fullmatch(name)]:
            raise CheckpointError(f"the files have tensors for which the model has no place: {listed(strange)}")
        for read_operand in self.operands.values():
            read_operand()
        if rest:
            warn(
                f"the files have scales of a KV cache ({listed(rest)}), for which lpq has no place: they are left out, "
                "and an export of this model has none",
                CheckpointWarning,
            )

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the model at present, without what quantizers remember."""
        state, _ = self.model.state()
        memories = self.model.memories()
        return {key.removeprefix(PREFIX): tensor for key, tensor in state.items() if key not in memories}

    def _judge_tensor(self, name: str, tensor: Tensor) -> set[str] | None:
        """The tensors of the files that one of the model gets; None if there are none."""
        layer = name.removesuffix(".weight")
        if (stack := self.stacks.get(name)) is not None:
            names = stack.names
            return self._judge_quantized(name, tensor, names, lambda read: operand_of(names, read))
        if name.endswith(".weight") and layer in self.layers:
            return self._judge_quantized(name, tensor, [(layer,)], lambda read: read(layer))
        if (stack := self.stacks.get(f"{name.removesuffix('bias')}weight")) is not None and name.endswith("bias"):
            return self._judge_biases(name, tensor, [f"{layer}.bias" for layer in stack.layers])
        if name not in self.files.tensors:
            return None
        self._judge_plain(name, tensor, name)
        return {name}

    def _judge_quantized(
        self, name: str, weight: Tensor, names: Names, operand: Callable[[Callable[[str], Storage]], Storage]
    ) -> set[str]:
        """``names``: of the layers of each expert, or of the one layer. ``operand`` makes the operand of theirs."""
        *_, rows, cols = weight.shape
        each, dtype = rows // len(names[0]), weight.dtype
        entries = [self.layers[layer] for layers in names for layer in layers]
        for entry in entries:
            self.files.check_headers(entry, each, cols)
        self.operands[name] = lambda: operand(lambda one: self._operand(self.layers[one], name, dtype, each, cols))
        return {f"{entry.name}.{part.name}" for entry in entries for part in entry.parts}

    def _judge_biases(self, name: str, tensor: Tensor, biases: Sequence[str]) -> set[str]:
        """``biases``: of the experts."""
        if absent := [bias for bias in biases if bias not in self.files.tensors]:
            raise CheckpointError(f"the files have nothing for these tensors of the model: {listed(absent)}")
        for number, (bias, row) in enumerate(zip(biases, local_part(tensor), strict=True)):
            self._judge_plain(bias, row, name, number)
        return {*biases}

    def _operand(self, entry: Quantized, name: str, dtype: torch.dtype, rows: int, cols: int) -> Storage:
        """The row operand of a layer, of this many rows of the weight of this name."""
        side = self.intended.stored.get(name, registry.quantizer(entry.scheme.quantizer))
        if not entry.scheme.serves(side):
            lies = f"{entry.scheme.title} in the files ({entry.scheme.quantizer})"
            raise self._unfit(f"{entry.name}.weight is {lies}, and stored as {side}")
        parts = self.files.parts(entry, rows, cols)
        try:
            buffers = entry.scheme.read(side, parts[: len(entry.scheme.parts)])
        except ValueError as error:
            raise self._unfit(f"{entry.name}: {error}") from error
        if entry.inputs is not None and entry.inputs.read is not None:
            self.amaxes[entry.name] = entry.inputs.read(parts[-1])
        operand: Storage = side.storage.from_tensors([*buffers], side, (rows, cols), dtype)
        return operand

    def _unfit(self, what: str) -> CheckpointError:
        """The error that weights which are to be stored quantized do not fit the files."""
        fitting = self.intended.fitting(by_module(self.layers, self.stacks))
        return CheckpointError(f"{what}: convert by what fits the files, {fitting}; or by weights=None, which decodes")

    def _judge_plain(self, name: str, tensor: Tensor, own: str, number: int | None = None) -> None:
        """``own``: the name of the tensor in the model; ``number``: its part of that."""
        kind = self.files.tensors[name]
        if kind.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(kind.shape)}, and in the model {list(tensor.shape)}: make the model with the "
                f"sizes that {CONFIG} beside the files gives"
            )
        if (side := self.intended.stored.get(own)) is not None:
            raise self._unfit(f"{name} is {kind.dtype} and not quantized in the files, and stored as {side}")
        if kind.dtype != tensor.dtype and not (kind.dtype in DTYPES and tensor.dtype in DTYPES):
            raise CheckpointError(
                f"{name} is {kind.dtype} and not quantized in the files, and {tensor.dtype} in the model: cast one of "
                f"them, or have {CONFIG} describe it"
            )
        self.plain.append((own, number, name))

    @torch.no_grad()
    def fill(self) -> None:
        """Write it all."""
        self.model.own_memories()
        tensors, stored = self._tensors(), self.intended.stored
        unlike = {*self.operands, *(n for n, _, _ in self.plain)} - tensors.keys()
        unlike |= {
            n for n in self.operands.keys() & tensors.keys() if stored_side(n, tensors[n]) not in (None, stored.get(n))
        }
        if unlike:
            raise CheckpointError(
                f"a plugin converted {listed(sorted(unlike))} otherwise than lpq does: load the files with weights=None"
            )
        for own, number, name in self.plain:
            local = local_part(tensors[own])
            (local if number is None else local[number]).copy_(self.files.read(name))
            touched(tensors[own])
        for name, read_operand in self.operands.items():
            local, operand = local_part(tensors[name]), read_operand()
            if isinstance(local, QuantizedTensor):
                _fill(local, operand)
            else:
                local.copy_(decode(operand, local.dtype))
            touched(tensors[name])
        amaxes = dict(self.amaxes)
        for stack in self.stacks.values():
            make_static(stack, amaxes)
        for name, layer in self.model.layers():
            if name in amaxes and _remembers(layer, amaxes[name]):
                del amaxes[name]
        self.model.module.__dict__[RECORD] = amaxes


def _fill(weight: QuantizedTensor, operand: Storage) -> None:
    """Give a stored weight this row operand, and the column operand that follows."""
    row, col = weight.stored
    assert row is not None
    _copy(row, operand)
    if col is not None:
        _, column, _ = quantize(decode(row, torch.float32), None, None, col.quantizer)
        assert column is not None
        _copy(col, column.astype(col.dtype))


def _copy(target: Storage, source: Storage) -> None:
    for mine, theirs in zip(target.tensors(), source.tensors(), strict=True):
        mine.copy_(theirs)


def _remembers(layer: Layer, amax: Tensor) -> bool:
    """Make the quantizer of a layer's input remember that amax or be static by it, if it uses one of whole inputs."""
    if layer.recipe is None:
        return False
    x = layer.recipe.x
    if (key := static_key(x)) is not None:
        layer.states()["x"][key].copy_(amax)
        layer.passes.forget()
        return True
    side = x.side("row")
    if [stat.of_all for stat in side.stats if side.recalls(stat)] != [True]:
        return False
    remember(x, layer.states()["x"], [amax.to(layer.weight.device)], col=False)
    layer.decide_fresh()
    return True
