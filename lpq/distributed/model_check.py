"""The check that ranks which share a model have the same one, where lpq gathers none of its weights.

Layers under tensor parallelism call it before their passes. Where FSDP2 gathers weights in high precision, or ranks
hold replicas, nothing of lpq travels, so that a rank which alone has changed a recipe goes on until the others have
seen that it wants to compare.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq.distributed import meeting
from lpq.distributed.alike import Comparison, SharedLayer, agree, converted
from lpq.distributed.optimizer_steps import Watcher
from lpq.distributed.replicas import Replicas
from lpq.operations.reduce_statistics import Reductions
from lpq.torch_private.distributed import active_replica

if TYPE_CHECKING:
    from lpq.distributed.memories import Memories

L = TypeVar("L", bound=SharedLayer)

MOST = 1024
"""The number of different inputs that are remembered."""


class PassInput(NamedTuple):
    """The properties of an input on which the collectives of a pass depend. They are equal on all ranks of the mesh."""

    mesh: DeviceMesh
    shape: torch.Size
    dtype: torch.dtype
    result: torch.dtype
    """The dtype of the output, which under autocast is another one."""
    placements: Any
    """The placements on the mesh, if the input is a DTensor; ``shape`` is then the global shape."""
    gets: tuple[bool, ...]
    """Whether the input, the weight and the bias get gradients."""
    encoded: str | None
    """How the input is encoded, if it arrives so."""
    joined: bool
    """Whether the layer is one of several that are computed as one function, with other collectives."""
    layout: torch.layout
    device: torch.device
    """A layout or a device that this rank refuses makes the input a new one."""

    def __str__(self) -> str:
        over = "" if self.placements is None else f" over the mesh as {self.placements}"
        named = zip(("its input", "its weight", "its bias"), self.gets, strict=True)
        trained = " and ".join(name for name, gets in named if gets) or "nothing"
        how = "" if self.encoded is None else f" encoded as {self.encoded}"
        within = ", in a fused block" if self.joined else ""
        cast = "" if self.result == self.dtype else f", an output of {self.result}"
        return f"an input {[*self.shape]} of {self.dtype}{how}{over}, gradients of {trained}{cast}{within}"


class ModelCheck(Watcher):
    """Compares a model in the first forward that trains it, before the first pass of a sharded layer, and before a step
    of its optimizer where some ranks had no pass to compare in; and again after a recipe has changed. While recipes may
    change by step it does so each time: a rank cannot see that another one alone was given a step."""

    open = True
    """Whether passes are to look for ranks that share the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._replicas = Replicas()
        self._passes, self._steps = Comparison(), Comparison(self._replicas)
        """The comparisons before passes under tensor parallelism; and in a first forward, or before a step. Not all
        ranks may come to these: then all go on, and try it again at a step, while no pass waits for anybody."""
        self._inputs: set[PassInput] = set()
        """Inputs that ranks have compared."""
        self._memories: Memories | None = None
        self._remembers, self._sought, self._evaluated = False, False, False
        """Whether ranks have reduced what layers remember, and whether they sought those that share the model, in a
        pass that trains or in an evaluation."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelCheck | None:
        """The check of a model; None in a process that is alone, whose steps it would watch for nothing: to watch them
        imports the compiler."""
        alone = os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_initialized()
        return None if alone else cls(model)

    @classmethod
    def give(cls, layer: nn.Module) -> None:
        """Give the layers of a model a check in the first pass of one that has none, if ranks share the model: it is a
        copy, came out of a file, was made by hand, or is replicated though its weights were prepared for FSDP2."""
        if not dist.is_initialized():
            return
        if (wrapper := active_replica()) is not None:
            root = wrapper.module
        else:
            from lpq.torch_private import fsdp  # which imports FSDP2

            root = fsdp.outermost(layer)
            if getattr(layer, "gather", None) is not None or not fsdp.sites(root):
                return
        check = cls(root)
        for part in converted(root):
            if part.model.check is None:
                part.model.check = check

    def forget(self) -> None:
        """Compare again, since a recipe has changed."""
        self._passes.forget()
        if self._steps.forget() and not self._steps.moving:
            self._steps.tell()

    def changes_together(self, device: torch.device, traced: bool) -> Comparison | None:
        """Return the comparison that ranks make before an optimizer's step, if they rely on it: they have compared, and
        do not see in the next pass of a layer on this device, ``traced`` or not, that one rank has changed it."""
        passes = self._passes
        sees = not traced and (passes.moving or device.type in meeting.FREE)
        return self._steps if passes.sets and not sees else None

    def in_pass(self) -> None:
        """Compare in the first pass in which ranks share the model. Not all ranks may run this layer now; then they
        compare before the optimizer's step."""
        if not self.open or (model := self._model()) is None or not dist.is_initialized():
            return
        wrapper = active_replica()
        if not torch.is_grad_enabled():
            if wrapper is None:
                self._in_evaluation(model)
            return
        if wrapper is None and self._sought:
            return
        self._sought = True
        if wrapper is not None and self._replicas.note(wrapper):
            self._steps.alike = False
        if not self._steps.alike:
            self._steps.compare(model, meeting.SOON)
        self.open = not self._steps.sets and wrapper is None

    def _in_evaluation(self, model: nn.Module) -> None:
        """Compare once in a pass that trains nothing, if FSDP2 shards the model: a rank that compares before it gathers
        waits for this one."""
        from lpq.torch_private import fsdp  # which imports FSDP2

        if not (self._evaluated or self._steps.alike) and fsdp.sites(fsdp.outermost(model)):
            self._evaluated = True
            self._steps.compare(model, meeting.SOON)

    def before_trace(self) -> None:
        """Compare before a compiler traces a pass in which ranks send each other operands: it traces anew after a
        recipe has changed. The compiled code compares nothing."""
        passes = self._passes
        if not (passes.alike or passes.moving) and (model := self._model()) is not None and dist.is_initialized():
            passes.compare(model)

    def before_pass(
        self, layer: L, input: Tensor, weight: DTensor, result: torch.dtype,
        check: Callable[[L, Tensor, DTensor], None], encoded: str | None = None, joined: bool = False,
    ) -> None:  # fmt: skip
        """Raise on all ranks of a mesh unless they have the same model, call this layer with equal inputs, and none of
        them refuses its own; ``result``: the dtype of the output; ``check``: raises if this rank does; ``encoded``: how
        the input is encoded, if it arrives so; ``joined``: whether the layer is computed with others.

        Inputs are compared if they are new, since the host would wait for a GPU; on CPUs they always are, so that a
        rank which alone has another recipe or input than before is found in any pass. On GPUs the others may be in the
        collectives of the pass, as their inputs are known: there ranks meet in the store.
        """
        passes, grad, mesh = self._passes, torch.is_grad_enabled(), weight.device_mesh
        facts: PassInput | None = None
        refusal: Exception | None = None
        try:
            placements = input.placements if isinstance(input, DTensor) else None
            gets = tuple([grad and t is not None and t.requires_grad for t in (input, weight, layer.bias)])
            shape, dtype, layout, device = input.shape, input.dtype, input.layout, input.device
            facts = PassInput(mesh, shape, dtype, result, placements, gets, encoded, joined, layout, device)
        except RuntimeError:
            pass  # it has no shape: check says so
        due = passes.moving and passes.first() is layer
        if facts in self._inputs and mesh.device_type not in meeting.FREE and not due:
            if not passes.alike:  # since a recipe has changed
                passes.compare(self._model() or cast("nn.Module", layer), steps=False)
            return
        try:
            check(layer, input, weight)
            own = f"{layer.title} with {facts}"
        except (TypeError, ValueError, RuntimeError) as error:
            own, refusal = str(error), error
        differ = "the ranks do not call the same layer with equal parts of its input"
        alike = agree([own], mesh, differ, str(passes.alike), refusal) and passes.alike
        if refusal is not None:
            raise refusal
        if due or not alike:
            passes.alike = alike
            passes.compare(self._model() or cast("nn.Module", layer))
            passes.first = weakref.ref(layer)
        if len(self._inputs) >= MOST:
            self._inputs.clear()
        if facts is not None:
            self._inputs.add(facts)

    def concerns(self, params: Mapping[int, Tensor]) -> bool:
        self._memories = None  # it may be sharded now
        return super().concerns(params)

    def before_step(self, optimizer: Optimizer) -> None:
        model, comparison = self._model(), self._steps
        if model is None or not dist.is_initialized():
            return
        self.open = self.open and not self._sought
        if comparison.alike and not comparison.moving and not comparison.withholds:
            if not comparison.is_told(self._remembers):
                return
            comparison.alike = False
        # Ranks that reduce states in each step all come to it, and so look at once and wait for all.
        seconds = meeting.SOON if comparison.sets else meeting.SOON + meeting.PATIENCE
        comparison.compare(model, None if self._remembers else seconds)

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Make the states of layers equal. Layers whose weight is gathered quantized leave this to ``Gathering``."""
        if (model := self._model()) is None or not dist.is_initialized():
            return
        if self._memories is None:
            from lpq.distributed.memories import Memories

            self._memories = Memories(model, lambda layer: layer.gather is None, self._replicas)
        self._remembers |= self._memories.reduce(optimizer, reductions)
