"""MasterWeights: an optimizer that updates fp32 copies of quantized weights, and encodes these from them.

It wraps any torch optimizer. To all other code (schedulers, checkpoints, ``zero_grad``) it is an optimizer of the
model's parameters; the wrapped optimizer updates the copies in their place. A copy is cut as its weight is, so that an
optimizer's state is sharded too. After a step the weights whose copies changed are encoded, with one reduction of their
statistics; all others stay the same, to the bit. Copies that are kept between steps are *masters*. Others are decoded
when a step begins, and have no memory when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from operator import is_, ne
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import steps
from lpq.distributed.shard_groups import attach
from lpq.nn.first_argument import check_flags
from lpq.operations.reduce_statistics import Reductions
from lpq.optim.master_report import report
from lpq.optim.wrapper import Wrapper
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.tensor.encode_writes import write
from lpq.tensor.finite import Finite
from lpq.torch_private.dtensor import dtensor_over
from lpq.torch_private.optimizers import load_post_hooks
from lpq.torch_private.tensors import local_part, local_parts, version_of

MASTER = "master"
"""The name of a master in the optimizer's state."""
ROUNDED = (
    "masters begin with what weights decode to, as lpq.convert(…, weights='quantized') rounded these. To begin with "
    "the values before, call lpq.optim.load_high_precision(model, state_dict, optimizer) before the first step, with a "
    "state dict of the model as it was. Values that were drawn at random need none"
)


class _Seen(NamedTuple):
    """The counts that grow when a weight, or one of its buffers, is written to."""

    written: tuple[int, int, int]
    buffers: list[Tensor]
    versions: list[int]

    @staticmethod
    def of(weight: Tensor) -> _Seen:
        """The counts of a weight as they are now."""
        stored = cast("QuantizedTensor", local_part(weight))
        written, buffers = (version_of(weight), version_of(stored), stored.writes.count), stored.buffers
        return _Seen(written, buffers, [*map(version_of, buffers)])

    def still(self, now: _Seen) -> bool:
        """Whether nothing was written since. A buffer that is another tensor now is not compared: ``model.to()`` makes
        new tensors even where it moves nothing."""
        differ = map(ne, self.versions, now.versions)
        return self.written == now.written and not any(compress(map(is_, self.buffers, now.buffers), differ))


class MasterWeights(Wrapper):
    """``MasterWeights(torch.optim.AdamW(model.parameters(), …))``: its quantized weights get fp32 masters.

    Args:
        optimizer: The optimizer that steps the masters in place of the weights.
        keep: Keep the masters between steps. False: there are fp32 copies for as long as a step runs. A weight is still
            rounded once a step; updates that are too small for its format are lost.
    """

    def __init__(self, optimizer: Optimizer, keep: bool = True) -> None:
        self.check_wraps(optimizer)
        check_flags("MasterWeights", keep=keep)
        if isinstance(optimizer, MasterWeights):
            raise TypeError("MasterWeights got a MasterWeights: this optimizer is wrapped already, use it as it is")
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad has one at once
            raise ValueError(
                "MasterWeights takes an optimizer that has not taken a step yet: its state is of other tensors"
            )
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self.optimizer = optimizer
        """The wrapped optimizer."""
        self.keep = keep
        """Whether the copies of quantized weights are kept between steps, as masters."""
        self._copies: dict[Tensor, Tensor] = {}
        """The fp32 copy of each quantized weight, which the wrapped optimizer updates in its place."""
        self._finite = Finite()
        self._counts: dict[Tensor, _Seen] = {}
        self._rounded: set[Tensor] = set()
        """The weights that ``lpq.convert`` rounded, whose masters begin with what these decode to."""
        self._due: set[Tensor] = set()
        """The weights to encode from their masters. Weights of a step that raised remain for the next step."""
        self._shared = [dict(group) for group in self.param_groups]
        params = [[self._copy_of(p) for p in group["params"]] for group in optimizer.param_groups]
        for group, updated in zip(optimizer.param_groups, params, strict=True):  # once nothing can be refused
            group["params"] = updated
        for weight in [weight for weight in self._copies if weight in optimizer.state]:
            optimizer.state[self._copies[weight]] = {
                name: value.float() if isinstance(value, Tensor) else value
                for name, value in optimizer.state.pop(weight).items()
            }
        if not self._copies:
            warn(
                "MasterWeights has nothing to do: none of the optimizer's weights is stored quantized. "
                "lpq.convert(model, recipe, weights='quantized') stores them so, before the optimizer is made",
            )

    @property
    def masters(self) -> dict[Tensor, Tensor]:
        """The fp32 master of each quantized weight; none where copies are not kept."""
        return self._copies if self.keep else {}

    def report(self) -> str:
        """Tell which weights are stored in which format, what their masters take, and what the wrapped optimizer
        reports."""
        others = [p for group in self.param_groups for p in group["params"] if p not in self._copies]
        inner = getattr(self.optimizer, "report", None)
        own = report(self._copies, self.keep, others)
        return own if inner is None else f"{own}\n{inner()}"

    def updated(self, weight: Tensor) -> Tensor:
        """The tensor that the wrapped optimizer updates for a parameter, under which it has its state."""
        return self._copies.get(weight, weight)

    def _copy_of(self, weight: Tensor) -> Tensor:
        stored = local_part(weight)
        if not isinstance(stored, QuantizedTensor):
            return weight
        if weight in self._copies:
            raise ValueError(
                f"{_whose(weight)}a {list(weight.shape)} weight stands in the optimizer twice: give it each parameter "
                "once"
            )
        attach(weight)
        with torch.no_grad():
            without_memory = torch.full((), torch.nan, dtype=torch.float32, device=stored.device).expand(stored.shape)
            copy = _decoded(stored) if self.keep else without_memory
        if isinstance(weight, DTensor):  # it is sharded as its weight is
            copy = dtensor_over(copy, weight.device_mesh, weight.placements, tuple(weight.shape))
        self._copies[weight] = copy
        self.seen(weight)
        layer = stored.owner() if stored.owner is not None else None
        if self.keep and layer is not None and layer.gather is not None and layer.gather.rounded:
            self._rounded.add(weight)
        return copy.requires_grad_(weight.requires_grad)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Start the master of this weight, if it has one, from the weight's present values."""
        if weight in self.masters:
            local_part(self.masters[weight]).copy_(_decoded(local_part(weight)))
            self.seen(weight)

    def seen(self, weight: Tensor) -> None:
        """Take note that the weight and its master, if it has one, belong together as they are now."""
        if weight not in self._copies:
            return
        self._counts[weight] = _Seen.of(weight)
        self._due.discard(weight)
        self._rounded.discard(weight)

    def _fresh(self, weight: Tensor) -> bool:
        """Whether nothing was written to the weight since."""
        return weight in self._counts and self._counts[weight].still(_Seen.of(weight))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the copies, then encode the weights of those that changed. Where that raises, the stored weights are
        as they were. Masters are as far as it came; the next step encodes their weights, as does ``encode()``."""
        loss = self.begin(closure, lambda: [f"keep={self.keep}"])
        if not self.keep and not self.optimizer.state:
            self._follow()
        for weight, updated in self._pairs():
            if self.updated(weight) is not updated:
                raise RuntimeError(
                    f"{_whose(weight)}a {list(weight.shape)} parameter took the place of another one after "
                    "MasterWeights was made, so that a step would train nothing: have parameters exchanged, as "
                    "libraries do that shard a model, in the optimizer that it wraps, and make it afterwards"
                )
        for weight in self.masters:
            if not self._fresh(weight):
                raise RuntimeError(
                    f"{_whose(weight)}a {list(weight.shape)} weight was written to since its master was made, and the "
                    "step would undo that: make MasterWeights after loading weights, load its state after them, or "
                    "call take(weight), or seen(weight) where it is again what it was"
                )
        if self._rounded:
            self._rounded.clear()
            warn(ROUNDED)
        self._share_options()
        with self._filled():
            self._update()
            self._encode(steps().reductions(self))
        self._show_state()
        return loss

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """Give copies that are not kept memory inside, with the decoded values of their weights."""
        empty = [] if self.keep else [(local_part(copy), local_part(copy).data) for copy in self._copies.values()]
        try:
            for weight, (part, _) in zip(self._copies, empty, strict=not self.keep):
                part.data = _decoded(local_part(weight))
            yield
        finally:
            if not self.keep:
                self._due.clear()
            for part, without_memory in empty:
                part.data = without_memory

    def _update(self) -> None:
        """Step the wrapped optimizer, and put the weights whose copies it changed among those that are due."""
        before = {weight: _writes(copy) for weight, copy in self._copies.items()}
        reached: list[Tensor] = []
        try:
            for weight, copy in self._copies.items():
                copy.grad = None if weight.grad is None else weight.grad.float()
            reached = [weight for weight, copy in self._copies.items() if copy.grad is not None]
            with steps().part(self.optimizer):
                self.optimizer.step()
        finally:
            # Encoding an unchanged master would not always give the bytes that are there: a weight that came from a
            # checkpoint, or was made before its master, may have been encoded of more than it decodes to. Which
            # ones a step reached that raised cannot be found out: autograd does not count the writes of fused and
            # foreach optimizers. Nor can it be found out afterwards: a hook of it may have emptied the gradients.
            self._due.update(reached, (w for w, c in self._copies.items() if _writes(c) != before[w]))
            for copy in self._copies.values():
                copy.grad = None

    def _follow(self) -> None:
        """Take parameters that libraries which shard a model have put in place of others, before the first step."""
        params = [p for group in self.param_groups for p in group["params"]]
        if any(self.updated(weight) is not updated for weight, updated in self._pairs()):
            self._copies = {weight: copy for weight, copy in self._copies.items() if any(weight is p for p in params)}
            for ours, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
                theirs["params"] = [self._copies[p] if p in self._copies else self._copy_of(p) for p in ours["params"]]

    def _share_options(self) -> None:
        """Make the options of the groups the same here and in the wrapped optimizer: those that are here alone, or that
        schedulers and others changed here since the last call, go there, and changes there come here."""
        for ours, theirs, last in zip(self.param_groups, self.optimizer.param_groups, self._shared, strict=True):
            for key in (ours.keys() | theirs.keys()) - {"params"}:
                value, before = ours.get(key), last.get(key)
                changed = value is not before and (isinstance(value, Tensor) or value != before)  # pickles copy numbers
                if key in ours and (key not in theirs or changed):
                    theirs[key] = ours[key]
                else:
                    ours[key] = theirs[key]
                last[key] = ours[key]

    @torch.no_grad()
    def encode(self) -> None:
        """Encode every weight from its master; one collective for all."""
        self._due.update(self.masters)
        self._encode()

    def _encode(self, beside: Reductions | None = None) -> None:
        """Encode the weights that are due."""
        due = [weight for weight in self._copies if weight in self._due]  # in the same order on all ranks
        values = [part.detach() for part in local_parts(self._copies[weight] for weight in due)]
        stored = cast("list[QuantizedTensor]", local_parts(due))
        try:
            changed = None
            if not self.keep:  # a step of rate 0, as libraries take one before they load, is to leave no trace
                changed = [(_decoded(w) != value).any().float() for w, value in zip(stored, values, strict=True)]
            write(stored, values, beside=beside, changed=changed)
            self._finite.check(stored, values)
        finally:  # writes before the error are the optimizer's own
            for weight in due:
                self._counts[weight] = _Seen.of(weight)
        self._due.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as the wrapped optimizer would; none if it refuses them."""
        super().add_param_group(param_group)
        if not hasattr(self, "optimizer"):
            return
        group, copies = self.param_groups[-1], self._copies.copy()
        try:
            self.optimizer.add_param_group({**group, "params": [self._copy_of(p) for p in group["params"]]})
        except BaseException:
            self.param_groups.pop()
            self._copies, self._rounded = copies, self._rounded & copies.keys()
            raise
        self._shared.append(dict(group))

    # ------------------------------------------------------------------------------ copying, saving and loading

    def __getstate__(self) -> dict[str, Any]:
        fresh = [weight for weight in self.masters if self._fresh(weight)]
        own = {"optimizer": self.optimizer, "keep": self.keep, "_copies": self._copies, "_shared": self._shared}
        return {**super().__getstate__(), **own, "fresh": fresh, "due": [*self._due]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or one from a pickle, whose tensors count their writes anew."""
        fresh, due = state.pop("fresh", []), state.pop("due", [])
        super().__setstate__(state)
        self._finite, self._counts, self._due, self._rounded = Finite(), {}, set(), set()
        for weight in fresh:
            self.seen(weight)
        self._due.update(due)

    def _show_state(self) -> None:
        """Show the wrapped optimizer's state of each parameter, the master beside it, and the options that changed."""
        self._share_options()
        self.state.clear()
        masters = self.masters
        for weight, updated in self._pairs():
            state = dict(self.optimizer.state.get(updated, {}))
            if weight in masters:
                state[MASTER] = masters[weight]
            if state:
                self.state[weight] = state

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of each parameter and, beside it, its master."""
        has_begun = bool(self.state)
        self._show_state()
        for state in self.state.values():  # and not after each step: it takes 10 µs for each that is sharded
            if MASTER in state:
                state[MASTER] = state[MASTER].detach()
        try:
            return super().state_dict()  # whose hooks may give anything
        finally:
            if not has_begun:  # masters alone are none: torch's get_optimizer_state_dict begins the rest
                self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, or torch's ``get_optimizer_state_dict``, where parameters have names. The
        weights are not touched: they are in the model's state. Where it does not fit, nothing is loaded."""
        rest, masters = self._apart(self.hooked(state_dict))
        self.optimizer.load_state_dict(rest)
        with torch.no_grad():
            for weight, master in masters.items():
                local_part(self.masters[weight]).copy_(local_part(master))
                self.seen(weight)
        self._shared = [dict(group) for group in self.param_groups]  # those that were loaded count
        self._share_options()
        if self.optimizer.state:
            self._show_state()
        for after in load_post_hooks(self).values():
            after(self)

    def _apart(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[Tensor, Tensor]]:
        """A state as the wrapped optimizer takes it, and the master in it of each weight; an error if it is of other
        parameters."""
        sizes, ours = ([len(g["params"]) for g in gs] for gs in (state_dict["param_groups"], self.param_groups))
        if sizes != ours:
            raise ValueError(
                f"the state has groups of {sizes} parameters, and the optimizer of {ours}: make its groups as they "
                "were when the state was saved"
            )
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        inner = dict(state_dict["state"])
        masters: dict[Tensor, Tensor] = {}
        for key, (weight, own) in zip(keys, self._pairs(), strict=True):
            if weight not in self._copies:
                continue
            state = dict(inner.pop(key, {}))
            master = state.pop(MASTER, None)
            if state:
                inner[key] = state
            if not self.keep:
                continue
            if master is None:
                raise ValueError(
                    f"{_whose(weight)}the state has no master for parameter {key}, a {list(weight.shape)} weight: it "
                    "was saved without masters. Load the weights without the optimizer, then make MasterWeights"
                )
            if (shape := _shape(master)) != (here := _shape(own)):
                raise ValueError(
                    f"{_whose(weight)}the state has a master of shape {shape} for parameter {key}, a weight of shape "
                    f"{here}: load a state of the same parameters in the same order, sharded as they are here. "
                    "lpq.checkpoint goes by names and shards anew"
                )
            masters[weight] = master
        return {**state_dict, "state": inner}, masters

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with the tensor that the wrapped optimizer updates for it."""
        groups = zip(self.param_groups, self.optimizer.param_groups, strict=True)
        return [pair for ours, theirs in groups for pair in zip(ours["params"], theirs["params"], strict=True)]


def _whose(weight: Tensor) -> str:
    return getattr(local_part(weight), "whose", "")


def _decoded(weight: Tensor) -> Tensor:
    """The values that a stored tensor stands for, in memory of their own."""
    stored = cast("QuantizedTensor", weight)
    value = stored.dequantize(torch.float32)
    plain = any(operand.quantizer.plain for _, operand in stored.operands)  # decoded, its operand is its buffer
    return value.clone() if plain else value


def _writes(copy: Tensor) -> int:
    """The number of writes that autograd has counted; writes to a DTensor are counted there alone."""
    return version_of(copy) + version_of(local_part(copy))


def _shape(tensor: Tensor) -> str:
    """Return the shape of the whole and, where it differs, the shape of this rank's part."""
    whole, part = list(tensor.shape), list(local_part(tensor).shape)
    return f"{whole}" if part == whole else f"{whole} ({part} on this rank)"
