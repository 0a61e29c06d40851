"""QuantizedStates: an optimizer whose moments are stored in a format between steps.

It wraps any torch optimizer that steps each parameter by itself. The parameters are stepped one after the other: the
states of one are decoded, the wrapped optimizer steps it, and they are encoded again, into the same memory. So what is
decoded at one time are the states of one parameter. AdamW's step is in ``lpq.optim.adamw``: its kernel steps many, and
decodes tiles. All that decides what is stored, and how it is rounded, follows from the shape of the whole tensor and
from blocks that no shard cuts: shards hold the bytes that the whole would have.

A second moment, which divides the update, is stored as its root, under a name of its own: see ``lpq.optim.rounding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq import registry
from lpq.distributed.optimizer_steps import steps
from lpq.distributed.shard import plain, touched_each
from lpq.distributed.shard_groups import attach
from lpq.distributed.shardability import why_not_placed
from lpq.formats import Quantizer
from lpq.formats.blocks import block_amax
from lpq.operations.inputs import DTYPES, as_matrix
from lpq.operations.reduce_statistics import reduce_max
from lpq.optim import adamw
from lpq.optim.masters import MasterWeights
from lpq.optim.rounding import LeastKept, cautions, least_kept, raised, root_of, why_not
from lpq.optim.state_names import states_of
from lpq.optim.stored_size import LEAST, is_large, why_stays
from lpq.optim.wrapper import Wrapper
from lpq.registry.errors import OptionError, suggestion
from lpq.registry.showing import brief, listed
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.tensor.encode_writes import write
from lpq.torch_private.compiling import outside_graphs
from lpq.torch_private.dtensor import dtensor_as, dtensor_over
from lpq.torch_private.optimizers import load_pre_hooks, step_hooks
from lpq.torch_private.tensors import local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROOT = "root"
"""The end of the name of a second moment where its root is stored."""
State = dict[str, Any]
Member = tuple[dict[str, Any], Tensor]
"""A parameter, behind its group."""


class StateForm(NamedTuple):
    """How one state of each parameter is stored."""

    quantizer: Quantizer
    second: bool
    least: LeastKept | None
    """The least roots that the format keeps, of a second moment."""
    key: str
    """Its name in the state where it is stored."""
    like: bool
    """Whether it has the shape of its parameter."""


class QuantizedStates(Wrapper):
    """``QuantizedStates(torch.optim.AdamW(model.parameters(), …), exp_avg=…, exp_avg_sq=…)``: states in formats.

    ``MasterWeights`` goes around it, and not inside. A state stays as it is if it is a vector, or has fewer than
    ``least`` elements in all, or would not be smaller: ``report()`` tells.

    Args:
        optimizer: The optimizer whose states are stored.
        least: The number of elements that a state has at least, in all shards together, to be stored in a format.
        **formats: The format of each state by its name in the optimizer, a text or a quantizer. A state that is not
            named stays as it is.
    """

    def __init__(self, optimizer: Optimizer, *, least: int = LEAST, **formats: str | Quantizer) -> None:
        self.check_wraps(optimizer)
        if isinstance(optimizer, QuantizedStates | MasterWeights):
            remedy = {
                True: "put it inside, MasterWeights(QuantizedStates(optimizer, …))",
                False: "name all states at once",
            }[isinstance(optimizer, MasterWeights)]
            raise TypeError(f"QuantizedStates got a {type(optimizer).__name__}: {remedy}")
        if type(least) is not int or least < 0:
            raise OptionError(f"QuantizedStates: least={brief(least)}: it is a whole number of elements from 0 on")
        self.optimizer = optimizer
        """The wrapped optimizer. Groups and states are its own."""
        self.least = least
        forms = _forms(optimizer, formats)
        groups, state = optimizer.param_groups, optimizer.state
        try:
            super().__init__([dict(group) for group in groups], optimizer.defaults)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        self.forms = forms
        """How each state is stored, by its name in the optimizer."""
        params = self._params()
        self._check_placed(params)
        for p in params:
            self._settle(p)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of each parameter, stored."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as the wrapped optimizer would, if the formats serve by the options of this group, too."""
        if "forms" not in self.__dict__:  # torch adds the groups of the wrapped optimizer, which were tried together
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        self.optimizer.add_param_group(param_group)
        try:
            forms = _forms(self.optimizer, {name: form.quantizer for name, form in self.forms.items()})
            self._check_placed([p for group in self.param_groups[before:] for p in group["params"]])
        except BaseException:
            del self.param_groups[before:]
            raise
        self.forms = forms

    # ------------------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the small parameters together, then the ones of AdamW's own step, then each other one alone."""
        if any(step_hooks(self.optimizer)):
            kind = type(self.optimizer).__name__
            raise TypeError(
                f"QuantizedStates steps the parameters of {kind} one by one, and {kind} has hooks of whole steps: "
                "register them on the QuantizedStates"
            )
        loss = self.begin(closure, self._options)
        small: list[dict[str, Any]] = []
        alone: list[Member] = []
        for group in self.param_groups:
            parts: tuple[list[Tensor], list[Tensor]] = [], []
            for p in group["params"]:
                parts[is_large(p.shape, self.least)].append(p)
            small.append({**group, "params": parts[False]})
            alone += [(group, p) for p in parts[True] if p.grad is not None]
        with steps().part(self.optimizer):
            with self._only(small):
                self.optimizer.step()
            for group, p in self._step_adamw(alone):
                with self._only([{**group, "params": [p]}]), self._decoded(p):
                    self.optimizer.step()
        return loss

    def _options(self) -> list[str]:
        return [f"least={self.least}", *(f"{name}={form.quantizer}" for name, form in self.forms.items())]

    @outside_graphs  # a compiler takes groups for capturable ones, which AdamW itself would step
    def _step_adamw(self, alone: list[Member]) -> list[Member]:
        """Step parameters as AdamW does, and return the others, which the wrapped optimizer must step."""
        first, second = self.forms.get(adamw.FIRST), self.forms.get(adamw.SECOND)
        if first is None or second is None:
            return alone
        others: list[Member] = []
        again: list[Member] = []
        numbers: dict[int, dict[float, adamw.Numbers]] = {
            id(group): {} for group in self.param_groups if adamw.is_plain(self.optimizer, group)
        }
        launches = adamw.StepLaunches(first.quantizer, second.quantizer, second.least, _count)
        for group, p in alone:
            known = numbers.get(id(group))
            work = self._work(p, first, second) if known is not None else None
            if known is None or work is None:
                others.append((group, p))
                continue
            step = work.steps.item() + 1
            n = known.get(step)
            if n is None:
                n = known[step] = adamw.Numbers.of(group, step)
            outcome = launches.add(work, n)
            if outcome == "no kernel":
                self._step_by_reference(work, n, first, second)
            elif outcome == "again":
                again.append((group, p))
        launches.step()
        return others + (self._step_adamw(again) if again else [])

    def _step_by_reference(self, work: adamw.Work, n: adamw.Numbers, first: StateForm, second: StateForm) -> None:
        for form in (first, second):
            attach(self.state[work.parameter][form.key])  # loaded or copied, they do not know the other shards yet
        before = work.m.dequantize(torch.float32), work.root.dequantize(torch.float32)
        stepped, *after = adamw.step_reference(work.p, work.gradient, *before, n)
        write([work.m, work.root], [as_matrix(after[0]), _raised(as_matrix(after[1]), second, work.root)])
        work.p.copy_(stepped)
        _count([work])

    def _work(self, p: Tensor, first: StateForm, second: StateForm) -> adamw.Work | None:
        """A parameter with its gradient and moments, which begin here; None if a moment is not stored, or if they are
        not ordinary matrices, or shards that are placed alike."""
        own, gradient = p, cast("Tensor", p.grad)
        if isinstance(p, DTensor):
            if not isinstance(gradient, DTensor) or gradient.placements != p.placements:
                return None
            own = plain(local_part(p))
        gradient = local_part(gradient)
        if not (_is_ordinary(own) and _is_ordinary(gradient)):
            return None
        state: State = self.state[p]
        if not state:
            if any(self._why_stays(form, p) is not None for form in (first, second)):
                return None  # the wrapped optimizer begins as it does: fused, it counts steps on the device
            zero = {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name in self.forms}
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **zero)
            self._store(state, {})
        m, root = _part(state.get(first.key)), _part(state.get(second.key))
        if m is None or root is None:
            return None
        if not state["step"].is_cpu:
            state["step"] = state["step"].cpu()
        return adamw.Work(p, state["step"], own, gradient, m, root)

    def _check_placed(self, params: list[Tensor]) -> None:
        for p in params:
            for form in self.forms.values():
                if form.like and self._why_stays(form, p) is None:
                    _check_placed(form.quantizer, p)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @contextmanager
    def _only(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Have the wrapped optimizer step these groups."""
        whole, self.optimizer.param_groups = self.optimizer.param_groups, groups
        try:
            yield
        finally:
            self.optimizer.param_groups = whole

    @contextmanager
    def _decoded(self, p: Tensor) -> Iterator[None]:
        """Decode the states of a parameter, and encode them afterwards; on an error they are as they were."""
        state: State = self.state[p]
        stored = {form.key: state[form.key] for form in self.forms.values() if _part(state.get(form.key)) is not None}
        for name, form in self.forms.items():
            if form.key in stored:
                state[name] = _value(state.pop(form.key), form.second)
        try:
            yield
            self._store(state, stored)
        except BaseException:
            for name, form in self.forms.items():
                if form.key in stored:
                    state.pop(name, None)
            state.update(stored)
            raise

    def _store(self, state: State, targets: dict[str, Tensor]) -> None:
        """Encode the states of a parameter, into these tensors or into new ones."""
        names = [name for name, form in self.forms.items() if self._why_stays(form, state.get(name)) is None]
        into: dict[str, Tensor] = {}
        for name in names:
            form = self.forms[name]
            target = targets.get(form.key)
            into[name] = _empty(form.quantizer, state[name]) if target is None else target
            attach(into[name])
        stored = [cast("QuantizedTensor", local_part(target)) for target in into.values()]
        write(stored, [_matrix(state[name], self.forms[name], t) for name, t in zip(into, stored, strict=True)])
        for name, target in into.items():
            del state[name]
            state[self.forms[name].key] = target

    def _why_stays(self, form: StateForm, value: object) -> str | None:
        """Why a state is not stored in its format; None if it is."""
        if not isinstance(value, Tensor):
            return "the optimizer has none of it"
        if (layout := local_part(value).layout) is not torch.strided:
            return f"its layout is {layout}, as its gradient's"
        return why_stays(form.quantizer, value.shape, value.dtype, self.least)

    def _settle(self, p: Tensor) -> None:
        """Store the states of a parameter as this optimizer does. They may be decoded, or stored in another way."""
        state: State = self.state.get(p, {})
        forms = {form.key: (name, form) for name, form in self.forms.items()}
        others: dict[str, Tensor] = {}
        for key, own in [*state.items()]:
            name, form = forms.get(key, (key.removesuffix(f"_{ROOT}"), None))
            stored = _part(own)
            if stored is not None:
                del state[key]
                if form is not None and stored.quantizer == form.quantizer and self._why_stays(form, own) is None:
                    others[key] = own
                else:
                    state[name] = _value(own, name != key)
            elif name != key and isinstance(own, Tensor) and (form or name in self._seconds):  # torch decoded the root
                del state[key]
                state[name] = own.float().square().to(own.dtype)
        self._store(state, {})
        state.update(others)

    @cached_property
    def _seconds(self) -> set[str]:
        """The second moments of the wrapped optimizer, whether they are stored in a format or not."""
        with torch.device("cpu"):
            return {name for name, kind in states_of(self.optimizer).items() if kind.second}

    # ------------------------------------------------------------------------------ what is stored, copies, loading

    def report(self) -> str:
        """Tell which states are stored in which format, and why others are not. It is known after the first step."""
        if not self.state:
            return "The states that are stored in a format are known after a step"
        lines: list[str] = []
        for name, form in self.forms.items():
            stored = [part for state in self.state.values() if (part := _part(state.get(form.key))) is not None]
            values, size = sum(part.numel() for part in stored), sum(part.held_bytes for part in stored)
            root = ", of its root" if form.second else ""
            lines.append(
                f"{name}: {form.quantizer}{root}, of {len(stored)} tensors, {values} elements in {size} bytes "
                "on this rank"
            )
            stays: dict[str, list[str]] = {}
            others = (state.get(name) for state in self.state.values())  # SGD may keep None
            for value in (x for x in others if isinstance(x, Tensor) and _part(x) is None):
                stays.setdefault(str(self._why_stays(form, value)), []).append(str(list(value.shape)))
            lines += [f"  as it was, because {reason}: {listed(shapes)}" for reason, shapes in stays.items()]
        return "\n".join(lines)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, or the state of such an optimizer that was not wrapped, which is encoded."""
        if not load_pre_hooks(self):  # they may add what it lacks
            self.check_state(state_dict)
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for p in self._params():
                self._settle(p)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("optimizer", "least", "forms")}
        return {"defaults": self.defaults, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or take what ``load_state_dict`` read, which is the wrapped optimizer's."""
        theirs = {name: value for name, value in state.items() if name in ("state", "param_groups")}
        own = {name: value for name, value in state.items() if name not in theirs}
        self.__dict__.update(own)
        if theirs:
            self.optimizer.__setstate__(theirs)
        super().__setstate__(own)


def _forms(optimizer: Optimizer, formats: dict[str, str | Quantizer]) -> dict[str, StateForm]:
    kind = type(optimizer).__name__
    with torch.device("cpu"):  # whatever the default device is
        kinds = states_of(optimizer)
    has = f"{kind} keeps {', '.join(kinds)}" if kinds else f"{kind} keeps no state of a parameter"
    if not formats:
        raise OptionError(f"QuantizedStates got no format, and {has}: give one for each that is to be stored, by name")
    if formats.keys() & {"square_avg", "grad_avg"} and any(group.get("centered") for group in optimizer.param_groups):
        raise OptionError(
            f"QuantizedStates got a format for a state from which {kind} computes a variance, with centered=True: "
            "a difference, which would be negative where states are rounded, and the weight NaN: use centered=False"
        )
    forms: dict[str, StateForm] = {}
    for name, text in formats.items():
        if name not in kinds:
            raise OptionError(f"QuantizedStates got a format for {name!r}, and {has}: {suggestion(name, kinds)}")
        if not isinstance(text, str | Quantizer):
            raise OptionError(
                f"QuantizedStates got {name}={brief(text)}: give a format, or leave {name} out, which then "
                "stays as it is"
            )
        quantizer: Quantizer = registry.quantizer(text).side("row")
        second = kinds[name].second
        if kinds[name].sums:
            raise OptionError(
                f"QuantizedStates cannot store {name} of {kind} in a format: it adds up all steps, and beside a larger "
                "element of its block it would soon be rounded back to what it was, so that updates would never become "
                "smaller: leave it as it is"
            )
        with torch.device("cpu"):
            safe = why_not(quantizer) or (least_kept(quantizer, kinds[name].fall) if second else None)
            if isinstance(safe, str):
                raise OptionError(f"QuantizedStates cannot store {name} of {kind} as {quantizer}: {safe}")
            caution = cautions(quantizer, second, kinds[name].fall, safe, any(k.second for k in kinds.values()))
        if caution is not None:
            warn(f"QuantizedStates stores {name} of {kind} as {quantizer}, {caution}")
        forms[name] = StateForm(quantizer, second, safe, f"{name}_{ROOT}" if second else name, kinds[name].like)
    return forms


def _is_ordinary(part: Tensor) -> bool:
    """Whether this is a tensor of torch's own kind, in memory that a kernel reads."""
    is_tensor = type(part) in (Tensor, nn.Parameter) or type(part.detach()) is Tensor
    return is_tensor and part.layout is torch.strided and part.dtype in DTYPES


def _count(works: list[adamw.Work]) -> None:
    """Count a step of parameters that were stepped here."""
    one = torch.ones((), dtype=torch.float32, device="cpu")  # torch makes a number a tensor for each
    for work in works:
        work.steps.add_(one if work.steps.is_floating_point() else 1)
    touched_each([work.parameter for work in works])


def _part(state: object) -> QuantizedTensor | None:
    """This rank's part of a state that is stored in a format; None of any other."""
    part = local_part(cast("Tensor", state))
    return part if isinstance(part, QuantizedTensor) else None


def _value(state: Tensor, second: bool) -> Tensor:
    """The decoded state, in the dtype that the optimizer keeps it in."""
    stored = cast("QuantizedTensor", local_part(state))
    if second:
        local = stored.dequantize(torch.float32).square().to(stored.dtype)
    else:
        local = stored.dequantize()
    return dtensor_as(state, local) if isinstance(state, DTensor) else local


def _empty(quantizer: Quantizer, value: Tensor) -> Tensor:
    """A tensor to store a state in, placed as the state is."""
    _check_placed(quantizer, value)
    local = local_part(value)
    matrix = as_matrix(local).shape
    operand = quantizer.storage.empty(quantizer, tuple(matrix), value.dtype, local.device)
    tensor = QuantizedTensor(operand, None, quantizer, local.shape, value.dtype)
    if not isinstance(value, DTensor):
        return tensor
    return dtensor_over(tensor, value.device_mesh, value.placements, tuple(value.shape))


def _check_placed(quantizer: Quantizer, value: Tensor) -> None:
    """Refuse a placement over ranks whose parts are no parts of the whole operand; all ranks refuse alike."""
    if isinstance(value, DTensor) and (reason := why_not_placed(quantizer, value)) is not None:
        raise ValueError(
            f"a state of shape {list(value.shape)} cannot be stored as {quantizer} on these ranks, because {reason}. "
            "Which states are stored must not depend on the ranks: choose another format for all"
        )


def _matrix(value: Tensor, form: StateForm, target: QuantizedTensor) -> Tensor:
    """The matrix to encode of a state: of a second moment the root, with what the format would lose raised."""
    x = as_matrix(local_part(value))
    if not form.second:
        return x
    return _raised(root_of(x), form, target)


def _raised(root: Tensor, form: StateForm, target: QuantizedTensor) -> Tensor:
    """The roots with what the format would lose raised; a statistic of the whole is reduced over the ranks."""
    if form.least is None:
        return root
    amax, block = None, form.least.stat.block
    if target.amax_group is not None and block[0] is None:
        (amax,) = reduce_max([block_amax(root, block)], cast("ProcessGroup", target.amax_group))
    return raised(root, form.least, amax)
