"""Gathering: the weights of one model that are gathered quantized, and what all ranks must know of them together.

After an optimizer's step, every weight that it wrote to is measured, and one collective makes the statistics of all
of them those of the whole weights; what layers remember across steps is combined in the same way. A weight that was
written to otherwise (a checkpoint was loaded) is measured when it is gathered next, with all others of that kind.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lpq.core.reduce import max_in_place, same_ranks
from lpq.distributed import fsdp
from lpq.distributed.gather import Gather, Layer


class Gathering:
    """All weights of ``root`` that are gathered quantized."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._gathers: dict[nn.Module, Gather] = {}
        self._lends = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is loaded from a file, finds for itself how its model is sharded."""
        return {"root": self.root, "_gathers": {}, "_lends": False}

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
        return self._gathers.get(layer)

    def _find(self) -> None:
        if not self._gathers:
            _call_after_steps(self)
        checkpointed = _checkpointed(self.root)
        for module, site in fsdp.sites(self.root, "weight").items():
            if getattr(module, "gathering", None) is self and module not in self._gathers:
                layer = cast("Layer", module)
                self._gathers[module] = Gather(layer, site, self.refresh, module in checkpointed)

    def refresh(self) -> None:
        """Measure every weight that was written to, and reduce all their statistics in one collective."""
        self._reduce([g for g in self._gathers.values() if g.stale], [])

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer took a step: the same for its weights, and what their layers remember becomes that of all."""
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = [g for g in self._gathers.values() if id(g.site.param) in params]
        self._reduce(held, held)  # all of them: a compiled step writes without a trace

    def missing(self) -> list[Tensor]:
        """The buffers without memory of all weights that are gathered at present."""
        return [t for gather in self._gathers.values() for t in gather.missing()]

    def _reduce(self, written: list[Gather], remembering: list[Gather]) -> None:
        """One collective over each set of ranks that share out weights; there is one unless meshes differ."""
        measured, combined = set(written), set(remembering)
        by_ranks: dict[tuple[int, ...], list[Gather]] = {}
        for gather in dict.fromkeys([*written, *remembering]):
            by_ranks.setdefault(same_ranks(gather.site.group), []).append(gather)
        for gathers in by_ranks.values():
            group = gathers[0].site.group
            spanning = [values for g in gathers if g in measured for values in g.measure()]
            memories = [memory for g in gathers if g in combined for memory in g.layer.memories()]
            with torch.no_grad():
                max_in_place([*spanning, *memories], group)
                replicas = gathers[0].site.replicas
                if replicas is not None:  # they hold the same weights, and saw other inputs
                    max_in_place(memories, replicas)


def _call_after_steps(gathering: Gathering) -> None:
    """Have torch call ``after_step`` after the step of any optimizer, for as long as ``gathering`` lives.

    The hook stays behind it and does nothing: torch walks along the hooks when it calls them, and there a garbage
    collection, which may come at any time, must not take one away.
    """
    alive = weakref.ref(gathering)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.after_step(optimizer)

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
