"""The model's side of a checkpoint: its tensors by name, and their description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Replicas

from lpq.checkpoint.description import Description, formats_of, origins
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, tensor_name
from lpq.checkpoint.ranks import Meshes
from lpq.checkpoint.tensors import described
from lpq.nn import Layer
from lpq.nn.conversion import Conversion, records
from lpq.nn.expert_stacks import renamed, stacks_in_files
from lpq.nn.first_argument import check_model
from lpq.nn.names import plain_name
from lpq.nn.stateful_layer import StatefulLayer
from lpq.recipes import Policy, Recipe, Steps
from lpq.registry.errors import words
from lpq.registry.showing import listed
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.checkpoints import EXTRA_STATE
from lpq.torch_private.compiling import compiled_from
from lpq.torch_private.tensors import local_part

PREFIX = "model."
AS_SAVED = "Make the model of the modules that it had when it was saved"


class Model:
    """A model in the form of a checkpoint: the same whether it is compiled, sharded or neither."""

    def __init__(self, model: nn.Module) -> None:
        check_model(model, CheckpointError)
        inner: object = model
        while isinstance(inner, nn.Module):
            self.module = inner
            inner = inner.module if isinstance(inner, Replicas | nn.DataParallel) else compiled_from(inner)
        self._original = model

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Parameters and persistent buffers by name, and the values that modules return from ``get_extra_state``."""
        tensors: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            target = extra if is_extra(key) else tensors
            target[PREFIX + plain_name(key)] = value
        return tensors, extra

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by the names that they have in the model."""
        return {name.removeprefix(PREFIX): tensor for name, tensor in self.state()[0].items()}

    def meshes(self, replicas: bool = True) -> Meshes:
        """The ranks over which its tensors lie, and the ranks of its ``replicas``."""
        over = [mesh.mesh.flatten().tolist() for mesh in self._meshes()]
        over += [get_process_group_ranks(one.process_group) for one in self._replicas() if replicas]
        return frozenset(tuple(sorted(ranks)) for ranks in over)

    def groups(self, device: str) -> list[ProcessGroup]:
        """The groups over which it is trained on this type of device."""
        of_meshes = [group for mesh in self._meshes() if mesh.device_type == device for group in mesh.get_all_groups()]
        return of_meshes + [replicas.process_group for replicas in self._replicas() if replicas.device_type == device]

    def _meshes(self) -> list[DeviceMesh]:
        tensors = self.module.state_dict(keep_vars=True).values()
        return [*{id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}.values()]

    def _replicas(self) -> list[Replicas]:
        return [module for module in self._original.modules() if isinstance(module, Replicas)]

    def check_extra_state(self, saved: Collection[str]) -> None:
        """Make sure that each value of ``get_extra_state`` was saved, and that each saved one has a place."""
        mine = self.state()[1].keys()
        if absent := [tensor_name(name) for name in mine if name not in saved]:
            raise CheckpointError(f"it has nothing for these states of modules: {listed(absent)}. {AS_SAVED}")
        if excess := [tensor_name(name) for name in saved if name not in mine]:
            raise CheckpointError(
                f"it has states of modules for which the model has no place: {listed(excess)}. {AS_SAVED}"
            )

    def set_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Give modules back the states that ``get_extra_state`` returned."""
        for name, module in self.module.named_modules():
            key = PREFIX + _joined(name, EXTRA_STATE)
            if key in extra:
                module.set_extra_state(extra[key])

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """The layers of lpq by name; one that is in several places by each of its names."""
        return ((name, layer) for name, layer in self.stateful_layers() if isinstance(layer, Layer))

    def stateful_layers(self) -> Iterator[tuple[str, StatefulLayer]]:
        """The layers of lpq, and experts in stacks, whose quantizers remember statistics of each expert."""
        for name, module in self.module.named_modules(remove_duplicate=False):
            if isinstance(module, StatefulLayer):
                yield plain_name(name), module

    def memories(self) -> dict[str, Tensor]:
        """The buffers that hold the states of quantizers."""
        return {
            PREFIX + _joined(name, key): buffer
            for name, layer in self.stateful_layers()
            for key, buffer in layer.memories().items()
        }

    def own_memories(self) -> None:
        """Give each layer memories of its own, before they are filled: layers that share some may get other values."""
        for _, layer in self.stateful_layers():
            layer.own_buffers()

    def conversions(self) -> dict[str, Conversion]:
        """The records that ``lpq.convert`` left on the modules that it got, by the names of the modules."""
        return dict(records(self.module))

    def describe(self, tensors: Mapping[str, Tensor], step: int | None) -> Description:
        """The description of a checkpoint with these tensors."""
        quantized = {name: d for name, tensor in tensors.items() if (d := described(tensor)) is not None}
        conversions = self.conversions()
        recipes = [rule.recipe for c in conversions.values() for rule in c.policy.rules if rule.recipe is not None]
        recipes += [layer.recipe for _, layer in self.stateful_layers() if layer.recipe is not None]
        parts = map(local_part, tensors.values())
        stored = {name for p in parts if isinstance(p, QuantizedTensor) for name in formats_of(p.quantizer)}
        in_use = {name for recipe in recipes for q in recipe.operands.values() for name in formats_of(q)}
        return Description(
            step=step,
            conversions={n: {"policy": c.policy.to_dict(), "steps": c.steps} for n, c in conversions.items()},
            recipes={name: _text(layer.recipe) for name, layer in self.stateful_layers()},
            memories=tuple(self.memories()),
            quantized=quantized,
            formats=origins(in_use | stored),
            stored=tuple(sorted(stored)),
            aliases=self.aliases(),
            tied=tuple(self.tied()),
            transposed=tuple(name for name, layer in self.layers() if layer.transposed),
            **self._names_in_files(),
        )

    def aliases(self) -> dict[str, str]:
        """The first name of each tensor that has a further one, by that."""
        first: dict[int, str] = {}
        tensors = self.tensors().items()
        return {name: original for name, tensor in tensors if (original := first.setdefault(id(tensor), name)) != name}

    def tied(self) -> list[str]:
        """The first names of parameters that several modules have."""
        owners = Counter(id(p) for m in self.module.modules() for p in {*m.parameters(recurse=False)})
        aliases = self.aliases()
        return [name for name, tensor in self.tensors().items() if name not in aliases and owners[id(tensor)] > 1]

    def _names_in_files(self) -> dict[str, Any]:
        """The names of its experts in files of others, for an export of the checkpoint."""
        memories = self.memories()
        names = [key.removeprefix(PREFIX) for key in self.state()[0] if key not in memories]
        try:
            stacks = {stack.name: stack for stack in stacks_in_files(self.module)}
            others = renamed(self.module, [name for name in names if name not in stacks])
        except Exception as error:  # of transformers, which names them
            warn(
                "the checkpoint is saved without the names that experts have in files of engines, so that lpq.export "
                f"refuses it: export the model instead ({words(error)})",
                CheckpointWarning,
            )
            return {"stacks": None}
        layers = {n: {"recipe": _text(stack.recipe), "layers": stack.patterns} for n, stack in stacks.items()}
        return {"stacks": layers, "renamed": others}

    def check_policy(
        self,
        saved: Description,
        source: str = "lpq.checkpoint.info(path).policy",
        otherwise: str = "load(…, any_policy=True)",
    ) -> None:
        """Make sure that the model has the policy that it had when it was saved; one never converted has none.

        For the message: ``source`` is where the saved policy is, and ``otherwise`` the call that goes on under another.
        """
        theirs = saved.policies()
        mine = {name: (c.policy, c.steps) for name, c in self.conversions().items()}
        alike = saved.recipes.keys() == {name for name, _ in self.stateful_layers()}
        if not theirs or (theirs.keys() == mine.keys() and all(_same(theirs[n], mine[n], alike) for n in theirs)):
            return
        raise CheckpointError(
            "it was saved under another policy than the model's, and going on would change the run.\n"
            f"{_policy_text('the checkpoint', theirs)}\n{_policy_text('the model', mine)}\n"
            f"Convert the model with the checkpoint's policy ({source}) for as many steps, or pass "
            f"{otherwise} to go on under the model's own"
        )

    def restore_recipes(self, saved: Description) -> None:
        """Give each layer the recipe, one of its policy, that it had at the step at which it was saved."""
        wrong = []
        for name, layer in self.stateful_layers():
            if name not in saved.recipes or saved.recipes[name] == _text(layer.recipe):
                continue
            pieces = layer.schedule.pieces if layer.schedule is not None else ()
            fitting = [recipe for _, recipe in pieces if _text(recipe) == saved.recipes[name]]
            if fitting:
                layer.take_recipe(fitting[0])
            else:
                wrong.append(f"{name} ({saved.recipes[name]}, and {_text(layer.recipe)} in the model)")
        if wrong:
            raise CheckpointError(
                f"layers had other recipes when they were saved: {listed(wrong)}. Give them these recipes, or say "
                "load(…, any_policy=True) to go on under the model's own"
            )

    @contextmanager
    def recipes_stay_on_error(self) -> Iterator[None]:
        """If the code inside fails, give layers back the recipes and memories that they had."""
        before = [(layer, layer.recipe, layer.memories()) for _, layer in self.stateful_layers()]
        try:
            yield
        except BaseException:
            for layer, recipe, memories in before:
                if layer.recipe != recipe:
                    layer.take_recipe(recipe)
                    for name, memory in memories.items():
                        setattr(layer, name, memory)
            raise

    def starting(self, absent: Collection[str]) -> dict[str, Tensor]:
        """The states that start anew because some were not saved: for each tensor all of its quantizer's states, or
        none. A warning names the tensors whose states were saved in part.
        """
        fresh: dict[str, Tensor] = {}
        halves: list[str] = []
        for name, layer in self.stateful_layers():
            buffers = layer.state_buffers()
            for of in dict.fromkeys((memory.stack, memory.tensor) for memory in buffers):
                names = [memory.name for memory in buffers if (memory.stack, memory.tensor) == of]
                own = {PREFIX + _joined(name, key): getattr(layer, key) for key in names}
                gaps = [tensor_name(key) for key in own if key in absent]
                fresh.update(own if gaps else {})
                halves += gaps if len(gaps) < len(own) else []
        if halves:
            warn(
                f"the checkpoint lacks {listed(halves)}, and has other states of the same quantizers: all states of "
                "these quantizers start anew",
                CheckpointWarning,
            )
        return fresh

    @torch.no_grad()
    def forget(self, memories: Mapping[str, Tensor]) -> None:
        """Start these memories anew. The others are filled."""
        for memory in memories.values():
            memory.zero_()
        for _, layer in self.stateful_layers():
            layer.decide_fresh()


def is_shared(model: object, replicas: bool = True) -> bool:
    """Whether ranks share a model: its parameters lie over a mesh, or it has ``replicas``, which must all be written
    to, though each rank could read its own. A path is not shared. Any other object counts as shared, so that all ranks
    get the error."""
    if isinstance(model, nn.Module):
        return bool(Model(model).meshes(replicas))
    return not isinstance(model, str | Path)


def is_extra(name: str) -> bool:
    """Whether this name in a state dict belongs to a module's ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _joined(module: str, name: str) -> str:
    return plain_name(f"{module}.{name}" if module else name)


def _text(recipe: Recipe | None) -> str | None:
    return recipe.text if recipe is not None else None


def _same(a: tuple[Policy, Steps], b: tuple[Policy, Steps], alike: bool) -> bool:
    """Whether two policies have the same rules, and a run of the same length if rules end at a fraction of it.

    ``alike``: both gave recipes to the same layers, so rules that leave layers out need no comparison.
    """
    fractions = any(isinstance(rule.until, float) for rule in a[0].rules)
    rules = a[0].rules == b[0].rules and (alike or a[0] == b[0])
    return rules and (a[1] == b[1] or not fractions)


def _policy_text(whose: str, policies: Mapping[str, tuple[Policy, Steps]]) -> str:
    if not policies:
        return f"{whose} has none"
    texts = []
    for name, (policy, steps) in policies.items():
        where = f" for {name}" if name else ""
        length = f", for {steps} steps" if isinstance(steps, int) else ""
        texts.append(f"{whose} has{where}{length}:\n{policy.to_toml().strip()}")
    return "\n".join(texts)
