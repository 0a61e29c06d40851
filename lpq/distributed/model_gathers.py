"""Gathering: the weights of one model that are gathered quantized, and their statistics, which ranks reduce together.
After an optimizer's step, every weight that it wrote to is measured. One collective reduces their statistics to the
statistics of whole weights, and also the states of layers, whatever models they belong to. A weight that was written to
in another way (a checkpoint was loaded, no step was taken yet) is measured at its next gather, with all other such
weights of its model, whatever calls of ``lpq.convert`` got them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lpq.distributed import meeting
from lpq.distributed.alike import Comparison
from lpq.distributed.gather_check import compare_before_gather
from lpq.distributed.gather_unit import Unit
from lpq.distributed.memories import Memories
from lpq.distributed.optimizer_steps import Watcher, steps
from lpq.distributed.several_matrices import Measurements, Scratch
from lpq.distributed.shard_groups import attach
from lpq.distributed.shard_statistics import measure_all, stale
from lpq.distributed.weight_gather import Gather, GatheredLayer
from lpq.operations.reduce_statistics import Reductions
from lpq.registry.showing import listed
from lpq.tensor.fsdp_protocol import Gathered
from lpq.torch_private import fsdp
from lpq.torch_private.compiling import CALLBACKS, PRINTS_GUARDED, call_around_compiling
from lpq.torch_private.distributed import CheckpointWrapper
from lpq.torch_private.tensors import local_part, local_parts


class Gathering(Watcher):
    """All weights that are gathered quantized, of the module that ``lpq.convert`` got. It keeps neither that module nor
    a layer alive: a part of a model that is used by itself, as a stage of a pipeline, has no other part."""

    def __init__(self, root: nn.Module | None) -> None:
        self._layers: dict[int, weakref.ref[nn.Module]] = {}
        """The layers of these weights, by their ``id``, in the order of the model."""
        self.comparison = Comparison()
        self.lends = PRINTS_GUARDED
        self._gathers: dict[nn.Module, Gather] = {}
        self._memories: Memories | None = None
        self._measurements: Measurements = {}
        self.scratch = Scratch()
        super().__init__(root)

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin anew: a copy, or one from a file, has its own model, which may be sharded differently. Its layers add
        themselves."""
        return Gathering, (None,)

    def __setstate__(self, root: nn.Module) -> None:
        """Leave it to the layers to refuse a pickle of an earlier version."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathering:
        """Begin anew, with the copy of the module if that is copied."""
        return Gathering(memo.get(id(self._model())))

    def add(self, layer: nn.Module) -> None:
        """Add the layer of a weight."""
        self._layers[id(layer)] = weakref.ref(layer)

    @property
    def root(self) -> nn.Module:
        """The module that ``lpq.convert`` got. Where it is gone, or unknown to the model of a file: all modules that
        FSDP2 shards around its layers, and layers that it shards by themselves."""
        if (root := self._model()) is not None:
            return root
        around: dict[nn.Module, None] = {}
        within: set[nn.Module] = set()
        for layer in [layer for ref in self._layers.values() if (layer := ref()) is not None]:
            if layer not in within:
                around[top := fsdp.outermost(layer)] = None
                within.update(top.modules())
        return next(iter(around)) if len(around) == 1 else nn.ModuleList(around)

    def of(self, layer: nn.Module) -> Gather:
        """Return how the weight of this layer is gathered. The first call comes when FSDP2 has sharded the model."""
        if layer not in self._gathers or self._gathers[layer].unit is None:
            self._find()
        if self.lends:
            self.lend()
        if layer not in self._gathers:
            title = getattr(layer, "title", str(layer))
            raise RuntimeError(
                f"{title}: its weight was prepared by lpq.convert(…, weights=…), and is in no module on which "
                "fully_shard was called: call fully_shard on the model once its blocks are sharded"
            )
        return self._gathers[layer]

    def _find(self) -> list[Gather]:
        """Return how each weight of the whole model is gathered, including weights that another call of ``lpq.convert``
        got. The order is the order in the model as it is sharded now, and so the same on all ranks.
        """
        around = fsdp.outermost(self.root)  # a part of a model may have been converted, and the whole sharded
        checkpointed = _checkpointed(around)
        gathers: list[Gather] = []
        for module, site in fsdp.sites(around, "weight").items():
            if (gathering := _gathering_of(module)) is not None:
                gather = cast("GatheredLayer", module).gather
                assert gather is not None
                if module not in gathering._gathers:
                    gather.shard_by(site, gathering, module in checkpointed)
                    gathering._gathers[module] = gather
                gathers.append(gather)
        units: dict[object, list[Gather]] = {}
        for gather, shard in zip(gathers, fsdp.shards(gather.site for gather in gathers), strict=True):
            if isinstance(shard, Gathered):  # somebody may have put an ordinary parameter in the place of another one
                units.setdefault(gather.site.unit, []).append(gather)
        for together in units.values():
            if any(gather.unit is None or gather.unit.gathers != together for gather in together):
                unit = Unit(together)
                for gather in together:
                    gather.unit = unit
        return gathers

    def lend(self) -> None:
        """Have the freed buffers of gathered weights hold memory, with nothing in it, while torch compiles. Some
        versions of torch print every tensor of a graph into the text of its guards, and so read it. torch is told once,
        and again after ``torch.compiler.reset``."""
        compiler = sys.modules.get(CALLBACKS)
        if compiler is not None and _lend not in compiler.callback_handler.start_callbacks:
            call_around_compiling(_lend, _take_back)

    def forget(self) -> None:
        """Compare and decide again, since a recipe has changed."""
        for gather in self._gathers.values():
            gather.judged = None
        self.comparison.forget()

    def check(self, gather: Gather) -> None:
        """Compare the model with the other ranks' models, if that is due; a collective."""
        if compare_before_gather(self.comparison, self.root, gather):
            for module in fsdp.outermost(self.root).modules():
                if (gathering := _gathering_of(module)) is not None:
                    gathering.comparison = self.comparison

    def refresh(self) -> None:
        """Measure every weight of the model that was written to, and reduce all their statistics in one collective."""
        reductions = Reductions()
        gathers = self._find()
        measure_all(stale(gathers, fsdp.shards(gather.site for gather in gathers)), reductions, self._measurements)
        reductions.run()

    def weights(self) -> dict[str, Tensor]:
        """All weights that ``lpq.convert`` prepared, as an optimizer has them, by name."""
        sharded = fsdp.sites(fsdp.outermost(self.root), "weight")
        own = {name: m for name, m in self.root.named_modules() if _gathering_of(m) is self}
        weights = {name: sharded[m].param if m in sharded else m._parameters.get("weight") for name, m in own.items()}
        return {f"{name}.weight".strip("."): weight for name, weight in weights.items() if weight is not None}

    def missing(self) -> list[Tensor]:
        """The buffers without memory of all weights that are gathered at present."""
        return [t for gather in self._gathers.values() for t in gather.missing()]

    def concerns(self, params: Mapping[int, Tensor]) -> bool:
        """Whether a weight of the model is among these parameters, or a weight that was replaced. A copy that a thread
        is making has no modules yet, and no optimizer."""
        self._memories = None  # it may be sharded now
        if not any(isinstance(local_part(p), Gathered) or hasattr(p, "replaced_by") for p in params.values()):
            return False
        if any(getattr(param, "replaced_by", None) is not None for param in params.values()):
            return True
        return "_modules" in vars(self.root) and any(id(weight) in params for weight in self.weights().values())

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse parameters that are no longer in the model, and attach stored shards, maybe before any forward.
        Compare the model if a rank was to change a recipe without the others."""
        comparison = self.comparison
        if comparison.withholds or (comparison.relied_on and comparison.is_told(now=False)):
            comparison.compare(self.root, seconds=meeting.SOON, steps=False)
        params = _params(optimizer)
        for param, part in zip(params, local_parts(params), strict=True):
            if (by := getattr(param, "replaced_by", None)) is not None:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} has a {list(param.shape)} parameter that {by} replaced in the "
                    "model, so that its steps would train nothing: make the optimizer after lpq.convert(…, weights=…) "
                    "and after fully_shard"
                )
            if getattr(part, "amax_group", None) == "unattached":
                attach(param)
        if len({*map(id, params)}) < len(params):
            raise RuntimeError(_several_times(optimizer, params, self.weights()))

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Reduce the statistics of all weights of this optimizer (all, since a compiled step writes without a trace)
        and the states of layers, including layers whose weight could not be prepared."""
        params = {id(p) for p in _params(optimizer)}
        gathers = [*self._gathers.values()]
        pairs = zip(gathers, fsdp.parameters(gather.site for gather in gathers), strict=True)
        measure_all([gather for gather, param in pairs if id(param) in params], reductions, self._measurements)
        if self._memories is None:
            neither = (None, None)
            self._memories = Memories(
                self.root, lambda layer: _gathering_of(layer) is self or (layer.gather, layer.model.check) == neither
            )
        self._memories.reduce(optimizer, reductions)


_LENT: list[Tensor] = []
"""The buffers that hold memory while torch compiles."""


def _lend(*_: Any) -> None:
    _LENT[:] = [t for watcher in steps().watchers() if isinstance(watcher, Gathering) for t in watcher.missing()]
    fsdp.allocate(_LENT)


def _take_back(*_: Any) -> None:
    fsdp.free(_LENT)
    _LENT.clear()


def _gathering_of(module: Any) -> Gathering | None:
    """The weights that are gathered quantized together with this module's weight; None: it is not."""
    return module.model.fsdp if isinstance(vars(module).get("gather"), Gather) else None


def _several_times(optimizer: Optimizer, params: Sequence[Tensor], weights: Mapping[str, Tensor]) -> str:
    """The error for an optimizer that has a parameter several times. Libraries that exchange its parameters for the
    parameters of a sharded model may leave it so, and other weights in none; the loss may fall nevertheless. All ranks
    decide alike, by the optimizer and its parameters."""
    names = {id(weight): name for name, weight in weights.items()}
    times = Counter(map(id, params))
    several = next(param for param in params if times[id(param)] > 1)
    name = names.get(id(several), f"a parameter of {[*several.shape]}")
    none = [name for weight, name in names.items() if weight not in times]
    return (
        f"this {type(optimizer).__name__} has {name} {times[id(several)]} times, so that a step would write to it as "
        f"often{f', and it has no {listed(none, 3)}' if none else ''}: make it of model.parameters() once the model is "
        "sharded. If a library exchanged its parameters, have that shard the model as well"
    )


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _checkpointed(root: nn.Module) -> set[nn.Module]:
    """The modules inside PyTorch's wrapper for activation checkpointing, which may be compiled as well."""
    wrappers = [m for m in root.modules() if isinstance(m, CheckpointWrapper)]
    return {inner for wrapper in wrappers for inner in wrapper.modules()}
