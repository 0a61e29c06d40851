"""Gathering: the weights of one model that are gathered quantized, and what all ranks must know of them together.

After an optimizer's step, every weight that it wrote to is measured, and one collective makes the statistics of all
of them those of the whole weights; what layers remember across steps is combined in the same way. Weights that are
stored quantized are drafts during the step, and encoded then. A weight that was written to otherwise (a checkpoint was
loaded) is measured when it is gathered next, with all others of that kind.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lpq.core import QuantizedTensor
from lpq.core.reduce import max_in_place, same_ranks
from lpq.core.write import begin_drafts, drafted, encode_drafts, end_drafts
from lpq.distributed import fsdp
from lpq.distributed.attach import local
from lpq.distributed.gather import Gather, Layer


class Gathering:
    """All weights of ``root`` that are gathered quantized."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._gathers: dict[nn.Module, Gather] = {}
        self._watches = False
        self._lends = False
        self._stepping: weakref.ref[Optimizer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is loaded from a file, finds for itself how its model is sharded."""
        return {"root": self.root, "_gathers": {}, "_watches": False, "_lends": False, "_stepping": None}

    def of(self, layer: nn.Module) -> Gather:
        """How the weight of this layer is gathered. When that is asked first, FSDP2 has sharded the model."""
        if layer not in self._gathers:
            self._find()
        if not self._lends and "torch._dynamo" in sys.modules:  # to import it takes a second
            self._lends = True
            _lend_while_compiling(self)
        if layer not in self._gathers:
            raise RuntimeError(f"the weight of {layer} is in no module on which fully_shard was called")
        return self._gathers[layer]

    def find(self, layer: nn.Module) -> Gather | None:
        """The same, or None where FSDP2 shards nothing of this layer."""
        self.watch()
        return self._gathers.get(layer)

    def watch(self) -> None:
        """Have torch call ``before_step`` and ``after_step`` around the step of any optimizer."""
        if not self._watches:
            self._watches = True
            _watch_steps(self)

    def _find(self) -> None:
        self.watch()
        checkpointed = _checkpointed(self.root)
        for module, site in fsdp.sites(self.root, "weight").items():
            if getattr(module, "gathering", None) is self and module not in self._gathers:
                layer = cast("Layer", module)
                self._gathers[module] = Gather(layer, site, self.refresh, module in checkpointed)
        stepping = self._stepping() if self._stepping is not None else None
        if stepping is not None:  # its closure runs the first forward, before which FSDP2 makes the shards anew
            begin_drafts(self._stored(stepping))

    def refresh(self) -> None:
        """Measure every weight that was written to, and reduce all their statistics in one collective."""
        gathers = list(self._gathers.values())
        self._reduce([g for g in gathers if g.stale], [])

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins a step: it may write to a stored weight more than once."""
        if self._stepping is None or self._stepping() in (None, optimizer):
            self._stepping = weakref.ref(optimizer)
            begin_drafts(self._stored(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer took a step: weights are measured and encoded, and what layers remember becomes that of all."""
        if self._stepping is not None and self._stepping() is not optimizer:
            return  # it is wrapped by one whose step goes on
        self._stepping = None
        params = set(map(id, _params(optimizer)))
        held = [g for g in self._gathers.values() if id(g.site.param) in params]
        self._reduce(held, held)  # all of them: a compiled step writes without a trace
        stored = self._stored(optimizer)
        encode_drafts(stored)  # those that are not sharded
        end_drafts(stored)

    def missing(self) -> list[Tensor]:
        """The buffers without memory of all weights that are gathered at present."""
        return [t for gather in self._gathers.values() for t in gather.missing()]

    def _stored(self, optimizer: Optimizer) -> list[QuantizedTensor]:
        """The weights of the model, or this rank's shards, that the optimizer has and that are stored quantized."""
        stored = {id(p): t for p in _params(optimizer) if isinstance(t := local(p), QuantizedTensor)}
        found = []
        for layer in self.root.modules() if stored else ():
            if getattr(layer, "gathering", None) is self:
                gather = self._gathers.get(layer)
                weight = gather.site.param if gather is not None else cast("Layer", layer).weight
                if id(weight) in stored:
                    found.append(stored[id(weight)])
        return found

    def _reduce(self, written: list[Gather], remembering: list[Gather]) -> None:
        """One collective over each set of ranks that share out weights; there is one unless meshes differ."""
        measured, combined = set(written), set(remembering)
        by_ranks: dict[tuple[int, ...], list[Gather]] = {}
        for gather in dict.fromkeys([*written, *remembering]):
            by_ranks.setdefault(same_ranks(gather.site.group), []).append(gather)
        for gathers in by_ranks.values():
            group = gathers[0].site.group
            drafts = drafted(g.site.local for g in gathers if isinstance(g.site.local, QuantizedTensor))
            spanning = [values for g in gathers if g in measured for values in g.measure()]
            memories = [memory for g in gathers if g in combined for memory in g.layer.memories()]
            with torch.no_grad():
                max_in_place([*spanning, *memories, *(values for d in drafts for values in d.measure())], group)
                replicas = gathers[0].site.replicas
                if replicas is not None:  # they hold the same weights, and saw other inputs
                    max_in_place(memories, replicas)
                for draft in drafts:
                    draft.encode()


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _watch_steps(gathering: Gathering) -> None:
    """Have torch call ``gathering`` around the step of any optimizer, for as long as it lives.

    The hooks stay behind it and do nothing: torch walks along the hooks when it calls them, and there a garbage
    collection, which may come at any time, must not take one away.
    """
    alive = weakref.ref(gathering)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.before_step(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _lend_while_compiling(gathering: Gathering) -> None:
    """Have the freed buffers of gathered weights hold memory, with nothing in it, while torch compiles.

    For the words of its guards torch (2.11) prints every tensor that it meets, and so reads it.
    """
    from torch._dynamo.callback import callback_handler

    alive = weakref.ref(gathering)
    lent: list[Tensor] = []

    def lend(*_: Any) -> None:
        found = alive()
        if found is not None:
            lent[:] = found.missing()
            fsdp.allocate(lent)

    def take_back(*_: Any) -> None:
        fsdp.free(lent)
        lent.clear()

    callback_handler.register_start_callback(lend)
    callback_handler.register_end_callback(take_back)


def _checkpointed(root: nn.Module) -> set[nn.Module]:
    """The modules inside PyTorch's wrapper for activation checkpointing, which may be compiled as well."""
    wrappers = [m for m in root.modules() if isinstance(m, CheckpointWrapper)]
    return {inner for wrapper in wrappers for inner in wrapper.modules()}
