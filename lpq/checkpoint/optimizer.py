"""The optimizer's side of a checkpoint: its tensors by the names of the parameters they belong to, and the rest. It has
the content of ``state_dict``, with names in place of numbers. The rest (options of the groups, numbers in the state) is
plain data in which a tensor is replaced by its name. Loading fills the tensors that are there, and creates the tensors
of an optimizer that took no step yet. Nothing is cast, so that fp32 state of a bf16 parameter stays fp32.

A master that ``lpq.optim.MasterWeights`` saved beside a weight which was stored quantized goes into the master of that
weight here. Where there is none it is left out, and a master that was not saved starts from its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq.checkpoint.description import check_fields
from lpq.checkpoint.errors import CheckpointError, expect
from lpq.checkpoint.tensors import described, is_sharded, plain_like, stored_like
from lpq.files.safetensors import TensorKind
from lpq.optim.masters import MASTER, MasterWeights
from lpq.optim.states import QuantizedStates
from lpq.optim.unwrap import unwrapped
from lpq.registry.showing import brief, listed
from lpq.tensor import QuantizedTensor
from lpq.torch_private.pytree import tree_leaves
from lpq.torch_private.tensors import local_part

PREFIX = "optimizer."
MARK = "lpq.tensor"
"""The one key of the mapping that stands for a tensor in plain data."""
NUMBERED = ("params", "param_names")
"""The keys of a group that list its parameters in order, which may not be the order in the saved group."""

Optimizers = Optimizer | Sequence[Optimizer] | None
SavedTensors = Mapping[str, TensorKind]
"""The tensors in a checkpoint."""


def master_name(weight: str) -> str:
    """The name in a checkpoint of the fp32 master of the weight with this name."""
    return f"{PREFIX}state.{weight}.{MASTER}"


def untrained(data: Mapping[str, Any] | None, weights: Collection[str]) -> set[str]:
    """The weights that no saved optimizer had; none if no optimizer was saved: then it is not known."""
    groups = data["groups"] if data is not None else [{"params": weights}]
    return set(weights) - {name for group in groups for name in group["params"]}


def check_data(data: Any) -> None:
    """Refuse data that is no state of optimizers as ``split`` gives it, in which each tensor stands at its own name."""
    if data is None:
        return
    what = "its optimizer state (extra.pt)"
    check_fields(what, data, {"state": (dict,), "groups": (list,)})
    for name, state in data["state"].items():
        check_fields(f"{what} of {brief(name)}", {"name": name, "state": state}, {"name": (str,), "state": (dict,)})
        _check_tree(state, f"{PREFIX}state.{name}")
        expect(_is_mark(state.get(MASTER, {MARK: ""})), f"{what} of {brief(name)} has a master that is no tensor")
    for number, group in enumerate(data["groups"]):
        check_fields(f"{what} of group {number}", group, {"params": (list,), "options": (dict,)})
        all_names = all(isinstance(name, str) for name in [*group["params"], group.get("optimizer", "")])
        expect(all_names, f"{what} of group {number} has something else than names")
        _check_tree(group["options"], f"{PREFIX}groups.{number}")


def _check_tree(value: Any, name: str) -> None:
    if isinstance(value, Tensor) or (_is_mark(value) and value[MARK] != name):
        fault = value.dtype if isinstance(value, Tensor) else value[MARK]
        raise CheckpointError(f"its optimizer state (extra.pt) has {brief(fault)} as {name}: do not trust it")
    if isinstance(value, list | tuple) or (isinstance(value, Mapping) and not _is_mark(value)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_tree(inner, f"{name}.{key}")


def _is_mark(value: Any) -> bool:
    """Whether this stands for a tensor."""
    return isinstance(value, Mapping) and value.keys() == {MARK}


def optimizer_list(optimizer: Optimizers) -> list[Optimizer]:
    """The optimizers that were given: one, several or none. One that stands for another is replaced by that."""
    every = [*optimizer] if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    for one in every:
        if not isinstance(one, Optimizer):
            raise CheckpointError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(one).__name__}: pass "
                "the optimizers themselves, a dict's as list(optimizers.values())"
            )
    return [unwrapped(one) for one in every]


def kind(optimizer: Optimizer) -> str:
    """The name of the optimizer's class, or of the one inside the wrappers of ``lpq.optim``."""
    while isinstance(optimizer, MasterWeights | QuantizedStates):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__


def split(optimizers: Sequence[Named]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by name, and the plain data around them."""
    tensors: dict[str, Tensor] = {}
    data: dict[str, Any] = {"state": {}, "groups": []}
    for one in optimizers:
        for name, param, state in one.states():
            own: dict[str, Tensor] = {}
            data["state"][name] = _split(state, f"{PREFIX}state.{name}", own)
            _check_sharded(param, own)
            tensors.update(own)
        for names, options in one.groups():
            where = f"{PREFIX}groups.{len(data['groups'])}"
            data["groups"].append({"params": names, "options": _split(options, where, tensors), "optimizer": one.kind})
    return tensors, data


def join(
    optimizers: Sequence[Named],
    data: Mapping[str, Any] | None,
    saved: SavedTensors,
    masters: Collection[str],
    quantized: Mapping[str, Any],
) -> tuple[dict[str, Tensor], list[Loaded]]:
    """The tensors to fill, by the names they were saved under, and the state that each optimizer gets afterwards.

    ``masters``: the weights that were stored quantized and have a master in the checkpoint. ``quantized``: the
    descriptions of the tensors that were stored quantized, by name.
    """
    tensors: dict[str, Tensor] = {}
    source = _masters_alone(optimizers) if data is None else data
    return tensors, [one.join(source, saved, tensors, masters, quantized) for one in optimizers]


def _masters_alone(optimizers: Sequence[Named]) -> dict[str, Any]:
    """The data to load where no optimizer was saved: masters start from the weights, and no other state is set."""
    inner = [one.optimizer for one in optimizers]
    if not all(isinstance(one, MasterWeights) and one.keep and not one.optimizer.state for one in inner):
        raise CheckpointError("it was saved without an optimizer: load it without, or start the optimizer anew")
    groups = [{"params": names, "options": own} for one in optimizers for names, own in one.groups()]
    return {"state": {}, "groups": groups}


class Named:
    """An optimizer, and the names of its parameters in their order."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.whole_state = optimizer.state_dict()
        self.params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        for param in self.params:
            if id(param) not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is none of the model's: make "
                    "the optimizer after the model was converted and sharded, of model.parameters()"
                )
        self.names = [names[id(p)] for p in self.params]
        self.masters = optimizer.masters if isinstance(optimizer, MasterWeights) else {}
        self.kind = kind(optimizer)
        wrapped = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
        self.stores = isinstance(wrapped, QuantizedStates)
        """Whether it stores states in formats."""

    def states(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """The name, the parameter and the state of each parameter that has a state."""
        for number, state in self.whole_state["state"].items():
            yield self.names[number], self.params[number], state

    def groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The names and the options of each group."""
        for group in self.whole_state["param_groups"]:
            yield [self.names[i] for i in group["params"]], {k: v for k, v in group.items() if k not in NUMBERED}

    def join(
        self,
        data: Mapping[str, Any],
        saved: SavedTensors,
        tensors: dict[str, Tensor],
        masters: Collection[str],
        quantized: Mapping[str, Any],
    ) -> Loaded:
        """Prepare the state for this optimizer, and add the tensors to fill for it to ``tensors``."""
        loaded = Loaded(self.optimizer, self.params)

        def fill(value: Any, own: Any, param: Tensor | None) -> Any:
            def target(name: str, existing: object) -> Tensor:
                if name in quantized:
                    tensors[name] = self._stored(name, quantized[name], param, existing)
                else:
                    tensors[name] = _existing_or_new(saved, param, name, existing)
                return tensors[name]

            return _join(value, own, target)

        for group, (names, own) in zip(self.whole_state["param_groups"], self.groups(), strict=True):
            options = fill(self._saved_group(data, names)["options"], own, None)
            for key, value in options.items():
                if isinstance(own.get(key), int | float) and not isinstance(value, int | float | Tensor | None):
                    raise CheckpointError(
                        f"its optimizer state (extra.pt) has {key}={brief(value)}, which is no number"
                    )
            numbered = {key: group[key] for key in NUMBERED if key in group}
            loaded.groups.append({**own, **options, **numbered})
            for number in group["params"]:
                param, state = self.params[number], data["state"].get(self.names[number])
                if state is not None:
                    if self.names[number] in masters and param not in self.masters:
                        state = {key: value for key, value in state.items() if key != MASTER}
                        loaded.dropped += [self.names[number]] if isinstance(local_part(param), QuantizedTensor) else []
                    loaded.state[number] = fill(state, self.whole_state["state"].get(number), param)
                    if param in self.masters and MASTER in state:
                        self._check_master(param, self.names[number], loaded.state[number][MASTER])
                if param in self.masters and MASTER not in loaded.state.setdefault(number, {}):
                    loaded.state[number][MASTER] = self.masters[param]
                    loaded.starting.append(param)
        return loaded

    def _stored(self, name: str, entry: Mapping[str, Any], param: Tensor | None, existing: object) -> Tensor:
        """The existing state, if it is stored as the saved one was, or else a new one that is."""
        if not self.stores:
            raise CheckpointError(
                f"{name} was stored as {entry['quantizer']}, and this {self.kind} keeps states in high precision: wrap "
                "it in lpq.optim.QuantizedStates"
            )
        if isinstance(existing, Tensor) and described(existing) == entry:
            return existing
        if param is not None and list(param.shape) == entry["shape"]:
            return stored_like(name, param, entry)
        raise CheckpointError(f"{name} was stored quantized, and this optimizer has none yet: take one step first")

    def _check_master(self, param: Tensor, name: str, master: Tensor) -> None:
        here = self.masters[param]
        if (master.shape, master.dtype) != (here.shape, here.dtype):
            raise CheckpointError(
                f"its master of {name} is {master.dtype} of shape {list(master.shape)}, and the optimizer's is "
                f"{here.dtype} of shape {list(here.shape)}"
            )

    def _saved_group(self, data: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        """The saved group of these parameters, of an optimizer of this kind."""
        alike: Iterator[Mapping[str, Any]] = (g for g in data["groups"] if sorted(g["params"]) == sorted(names))
        if (group := next(alike, None)) is None:
            raise CheckpointError(
                f"no group of the saved optimizer has the parameters of one of this optimizer: {listed(names)}. "
                "Make the groups as they were when it was saved"
            )
        if (kind := group.get("optimizer", self.kind)) != self.kind:
            raise CheckpointError(
                f"the state of {kind} was saved, and this optimizer is {self.kind}, whose state is another: load "
                f"into {kind}, or without an optimizer"
            )
        return group


@dataclass
class Loaded:
    """The state that an optimizer gets once its tensors are filled."""

    optimizer: Optimizer
    params: list[Tensor]
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[int, Any] = field(default_factory=dict)
    starting: list[Tensor] = field(default_factory=list)
    """The weights with a master here that was not saved."""
    dropped: list[str] = field(default_factory=list)
    """The weights that are stored quantized, and whose saved masters have no place here."""

    @torch.no_grad()
    def apply(self, encoded: Mapping[Tensor, Tensor]) -> None:
        """Give the state to the optimizer. ``encoded``: by weight, the values from which it was encoded."""
        for weight in self.starting:
            assert isinstance(self.optimizer, MasterWeights)
            if weight in encoded:
                local_part(self.optimizer.masters[weight]).copy_(local_part(encoded[weight]))
            else:
                self.optimizer.take(weight)
        self.optimizer.load_state_dict({"state": self.state, "param_groups": self.groups})
        whole = self.optimizer if isinstance(self.optimizer, MasterWeights) else None
        wrapped = whole.optimizer if whole is not None else self.optimizer
        starting = {id(weight) for weight in self.starting}  # moments of a master that starts here are made fp32
        for number, values in self.state.items():
            param = self.params[number]
            updated = param if whole is None else whole.updated(param)
            state = {} if id(param) in starting else wrapped.state.get(updated, {})
            cast = [name for name, value in values.items() if name in state and _dtypes(state[name]) != _dtypes(value)]
            state.update({name: values[name] for name in cast})  # to the dtype of the parameter, by load_state_dict


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value
        return {MARK: name}
    if isinstance(value, Mapping):
        return {key: _split(v, f"{name}.{key}", tensors) for key, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_split(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _join(data: Any, existing: Any, target: Callable[[str, object], Tensor]) -> Any:
    """The inverse of ``_split``: ``target`` gives the tensor of a name, which may be the one that is there already."""
    if _is_mark(data):
        return target(data[MARK], existing)
    if isinstance(data, Mapping):
        inner = existing if isinstance(existing, Mapping) else {}
        return {key: _join(v, inner.get(key), target) for key, v in data.items()}
    if isinstance(data, list | tuple):
        beside = existing if isinstance(existing, list | tuple) and len(existing) == len(data) else [None] * len(data)
        items = [_join(v, e, target) for v, e in zip(data, beside, strict=True)]
        return tuple(items) if isinstance(data, tuple) else items
    return data


def _existing_or_new(saved: SavedTensors, param: Tensor | None, name: str, existing: object) -> Tensor:
    """The existing tensor, if it has the saved shape and dtype, or else a new one that is not initialised."""
    shape, dtype = saved.get(name, (None, None))
    if isinstance(existing, Tensor) and (shape is None or (existing.shape, existing.dtype) == (shape, dtype)):
        return existing
    if shape is None or dtype is None:
        raise CheckpointError(f"it lacks {name}, a tensor of the optimizer's state")
    if param is not None and shape == param.shape:
        return plain_like(name, param, dtype)
    if param is not None and math.prod(shape) > 1 and is_sharded(param):
        raise CheckpointError(
            f"{name} of shape {list(shape)} belongs to a sharded parameter of shape {list(param.shape)}, and only "
            "the optimizer knows how it is sharded itself: take one step, then load"
        )
    # load_state_dict puts a single number on the device that the optimizer needs.
    device = torch.device("cpu") if param is None or math.prod(shape) == 1 else local_part(param).device
    return torch.empty(shape, dtype=dtype, device=device)


def _check_sharded(param: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Refuse an ordinary tensor of the size of this rank's shard: its place in the whole is not known."""
    local = local_part(param).shape
    if not is_sharded(param) or local == param.shape:
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) and tensor.dim() and tensor.shape == local:
            raise CheckpointError(
                f"{name} is an ordinary tensor of the size of this rank's shard, and nothing shows what it is part of: "
                "an optimizer keeps the state of a sharded parameter in DTensors"
            )
