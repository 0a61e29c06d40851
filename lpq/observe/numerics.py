"""``lpq.observe.numerics``: how well the formats of a run fit its tensors, watched while it trains.

In every n-th step an observer takes sums over some rows of each tensor. They stay on the device, and are added up over
passes, and over ranks at the end of the step. The host waits for them when they are shown or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lpq import recipes
from lpq.distributed import meeting
from lpq.distributed.ranks import Ranks
from lpq.formats.format import DIRECTIONS, Direction, Quantizer
from lpq.nn.conversion_plan import names_of
from lpq.nn.expert_stacks import expert_stacks
from lpq.nn.first_argument import check_model, check_whole
from lpq.nn.linear import Layer
from lpq.nn.names import plain_name
from lpq.nn.observing import observing
from lpq.nn.plan import Plan
from lpq.nn.stateful_layer import StatefulLayer
from lpq.observe.operands import SomeRows, some_rows
from lpq.observe.readings import NO_VALUES, NumericsError, Readings, check_forgets
from lpq.observe.replays import Replays
from lpq.observe.shards import shards
from lpq.observe.sharing import device_of, inside_of_replicas, is_shared, refuse_inside
from lpq.observe.statistics import Question, statistics
from lpq.observe.sums import SUMS, Reading, reading_of
from lpq.operations.reduce_statistics import reduce_sum
from lpq.recipes import RecipeLike
from lpq.recipes.gemms import TENSORS
from lpq.recipes.globs import matching
from lpq.registry.errors import OptionError
from lpq.registry.showing import brief, listed
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed

Tokens = tuple[object, ...] | None
"""Which tokens some rows are, and in which basis their column operand is; None where it has none."""
Slot = tuple[str, str, str, str]
"""Layer, tensor, direction, and the other recipe that is asked about."""
REMEDY = "Enter step() of numerics on all of them, in every step"
PLACES = (*((tensor, direction) for tensor in TENSORS for direction in ("row", "col")), ("dw", ""))
"""The gradient's place is behind the places of ``dy``."""


class TensorSums(NamedTuple):
    """The sums of one tensor of a step."""

    sums: Tensor
    """``SUMS`` of its slots: of the row operand, of the column operand and, behind them, of the gradient."""
    norm: Tensor
    amax: Tensor
    """The norm and the largest magnitude of the whole tensor."""
    quantizer: Quantizer


class StepSums(NamedTuple):
    """The sums of one step, on the device: of each slot."""

    step: int
    formats: dict[Slot, str]
    sums: Tensor
    squares: Tensor
    """The sums of squares of whole tensors."""
    amax: Tensor


def numerics(
    model: nn.Module,
    *,
    every: int = 100,
    layers: str | Sequence[str] = "*",
    what_if: RecipeLike | None = None,
    rows: int = 256,
    step: int = 0,
    process_group: ProcessGroup | None = None,
) -> Numerics:
    """Watch how well the formats of ``model`` fit its tensors.

    Where ranks share a model, as under FSDP2 or DistributedDataParallel, all of them watch it, and each has the
    statistics of all.

    Args:
        model: A converted model, compiled and sharded or not.
        every: Statistics are taken in steps whose number is a multiple of this.
        layers: Patterns for the names of the layers that are watched, such as ``"blocks.0.*"``.
        what_if: A recipe for which the same statistics are taken, of the tensors that the layers' own recipes lead to.
        rows: About how many rows of a tensor are looked at in a step; in the next ones others are.
        step: The number of the step that begins; where a run is resumed, of the step with which it goes on.
        process_group: The ranks that have the same layers, as a stage of a pipeline has; None: all ranks, if they share
            the model.
    """
    check_model(model)
    check_whole("numerics", 1, NumericsError, every=every, rows=rows)
    check_whole("numerics", 0, NumericsError, step=step)
    patterns = [layers] if isinstance(layers, str) else [*layers] if isinstance(layers, Sequence) else []
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise NumericsError(
            f"numerics: layers={brief(layers)}: it is a pattern for the names of layers, as 'blocks.0.*', or several"
        )
    names = _names_of(inside_of_replicas(model), patterns)
    ranks = Ranks.of(process_group, is_shared(model), "watches")
    other = None if what_if is None else recipes.recipe(what_if)
    if other is not None:
        check_forgets("numerics: what_if", other)
        if all(quantizer.plain for quantizer in other.operands.values()):
            raise OptionError(f"numerics: what_if: {other.title} encodes nothing, so there is no error to tell of")
    options = f"every={every}, rows={rows}, step={step}, what_if={other and other.text}"
    remedy = "Convert the model, and call this, alike on all of them; a stage of a pipeline passes its process_group="
    ranks.equal([*names.values(), options], "numerics: the ranks do not watch the same", remedy)
    return Numerics(model, names, every, other, rows, step, ranks)


class Numerics(Readings):
    """Statistics of a run; ``lpq.observe.numerics`` makes it."""

    def __init__(
        self, model: nn.Module, names: dict[tuple[int, str], str], every: int, other: Any, rows: int, step: int,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        super().__init__(first=step)
        self.every, self.number = every, step
        """The number of the step that is under way, or that comes next."""
        self._names, self._rows, self._ranks = names, rows, ranks
        watched = {layer for layer, _ in names}
        self._layers = [m for m in model.modules() if isinstance(m, StatefulLayer) and id(m) in watched]
        self._other = None if other is None else (other.title, Plan.of(other))
        titles = ["", *([] if self._other is None else [self._other[0]])]
        self._slots: dict[Slot, int] = {}
        for name in names.values():
            for title in titles:
                for tensor, direction in PLACES:
                    self._slots[name, tensor, direction, title] = len(self._slots)
        self._pending: list[StepSums] = []
        self._now: dict[int, TensorSums] | None = None
        """The sums of the step that is under way, by the first slot of a tensor."""
        self._is_open = False
        """Whether a step is under way."""
        self._any_tensor = False
        """Whether a layer has told of a tensor in this step."""
        self._inputs: dict[tuple[int, int | None, str], tuple[object, Tokens, Tensor]] = {}
        """Pairs of tokens of the inputs, until backward asks for them."""
        self._replays = Replays()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of the training inside: forward, backward, and the optimizer's step if you like. Steps in which
        statistics are taken run eagerly, also where the model is compiled."""
        if self._is_open:
            raise NumericsError(
                f"step() of numerics: step {self.number} is under way already: enter it once around each step; another "
                "lpq.observe.numerics may be entered within"
            )
        self._is_open = True
        try:
            with self._step():
                yield
        finally:
            self._is_open = False

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.number % self.every:
            yield
            self.number += 1
            return
        formats, self._any_tensor = self._formats(), False
        now = self._now = dict[int, TensorSums]()
        try:
            for shard in shards(self._layers):
                self.observe(shard)
            with observing(self._layers, self):
                yield
        finally:
            self._now = None
            self._inputs.clear()
        if not self._any_tensor:
            warn(
                f"no layer told of a tensor in step {self.number}: a CUDA graph that is replayed tells nobody, and "
                "neither does a step that leaves the layers out; watch passes that no graph replays"
            )
        self.number += 1
        if self._all_came():
            self._pending.append(self._over_ranks(self._of_slots(now, formats)))

    @torch.no_grad()
    def observe(self, tensor: Observed) -> None:
        """Take the sums of a tensor, of each of its groups if it has some."""
        if tensor.name == "y" or self._now is None or (id(tensor.layer), tensor.stack) not in self._names:
            return
        refuse_inside("numerics", self._ranks.size > 1)
        self._any_tensor = True
        if isinstance(tensor.given, QuantizedTensor):
            return  # nobody has the values that were rounded
        if tensor.given.is_meta:
            raise NumericsError(f"numerics: {tensor.name} of {tensor.layer.title} {NO_VALUES}")
        with torch.autocast(tensor.given.device.type, enabled=False):
            for part in tensor.groups():
                self._observe(part, "")
                if self._other is not None:
                    title, plan = self._other
                    self._observe(part.under(getattr(plan, part.name)), title)

    def _observe(self, tensor: Observed, recipe: str) -> None:
        rows = some_rows(tensor, self._rows, self.number // self.every)
        if rows is None:
            return
        key, tokens, of_input = (id(tensor.of_pass), tensor.group, recipe), _tokens(tensor, rows), None
        if tensor.name == "dy":
            _, of_others, of_input = self._inputs.pop(key, (None, None, None))
            of_input = of_input if tokens == of_others else None
        asks_pairs = tokens is not None and (tensor.name == "x" or of_input is not None)
        question = Question(
            rows.how, tensor.given.numel(), sums=not tensor.again, pairs=asks_pairs, gradient=of_input is not None
        )
        if not (question.sums or question.pairs):
            return
        given = [*([] if of_input is None else [of_input]), *rows.tensors]
        # Groups of rows have other sizes in each pass: nothing would be replayed.
        replays = tensor.group is None or tensor.name == "w"
        found = self._replays(statistics, question, given) if replays else statistics(question, given)
        if tensor.name == "x" and found.pairs is not None:
            # The pass is kept, so that no other has its id.
            self._inputs[key] = tensor.of_pass, tokens, found.pairs.clone()
        if not tensor.again:
            self._add(tensor, recipe, found.sums)

    def _add(self, tensor: Observed, recipe: str, sums: Tensor) -> None:
        """Add to the sums of a tensor."""
        now = self._now
        assert now is not None
        at = self._slots[self._names[id(tensor.layer), tensor.stack], tensor.name, "row", recipe]
        norm, amax = (torch.linalg.vector_norm(tensor.given, order, dtype=torch.float32) for order in (2, math.inf))
        if at in now:  # of another pass, or of another group
            former = now[at]
            norm, amax = torch.hypot(former.norm, norm), torch.maximum(former.amax, amax)
            # A graph that is run backward again has no pairs of its inputs left, so no slot of the gradient.
            more, less = (former.sums, sums) if len(former.sums) >= len(sums) else (sums.clone(), former.sums)
            more[: len(less)].add_(less)
            now[at] = TensorSums(more, norm, amax, tensor.quantizer)
        else:
            now[at] = TensorSums(sums.clone(), norm, amax, tensor.quantizer)

    def _of_slots(self, now: dict[int, TensorSums], formats: dict[Slot, str]) -> StepSums:
        """Put the sums of a step's tensors together, on one device."""
        device = next(device_of(layer.shared_weight()) for layer in self._layers)
        none, of_none = (
            torch.zeros((), dtype=torch.float32, device=device),
            torch.zeros(len(SUMS), dtype=torch.float64, device=device),
        )
        sums, norms, amaxes = ([one] * len(self._slots) for one in (of_none, none, none))
        slots = [*self._slots]
        for at, found in now.items():
            # Recipes may have changed since the step began.
            formats |= {
                slot: _format_of(found.quantizer, side)
                for slot, side in zip(slots[at : at + 2], DIRECTIONS, strict=True)
            }
            sums[at : at + len(found.sums)] = found.sums.to(device)
            norms[at : at + 2], amaxes[at : at + 2] = [found.norm.to(device)] * 2, [found.amax.to(device)] * 2
        squares = torch.stack(norms).double().square()
        return StepSums(self.number - 1, formats, torch.stack(sums), squares, torch.stack(amaxes))

    def _all_came(self) -> bool:
        """Whether all ranks have come to the end of this step, as all or none of them see. A rank that waited for the
        others in a collective would keep those that are in the next step, and wait for it there."""
        ranks, step = self._ranks, f"step {self.number - 1}"
        equal = True if ranks.size == 1 else meeting.meet(ranks.names, "watched steps", step, meeting.PATIENCE, "")
        if equal is None:
            warn(
                f"this rank watched {step}, and not all ranks that share the model have come to its end in "
                f"{meeting.PATIENCE:.0f} s, so its statistics are left out. {REMEDY}"
            )
        elif not equal:
            ranks.equal([step], "numerics: the ranks do not watch the same step", REMEDY)
        return bool(equal)

    def _over_ranks(self, step: StepSums) -> StepSums:
        """Add the sums of all ranks up, in one collective. The largest magnitudes go with them: each rank has a row of
        its own, to which others add 0, so a NaN stays one."""
        if self._ranks.size == 1:
            return step
        group: Any = self._ranks.group or dist.group.WORLD
        rows = step.sums.new_zeros(self._ranks.size, len(step.amax))
        rows[self._ranks.rank] = step.amax
        sums, squares, rows = reduce_sum([step.sums, step.squares, rows], group)
        return step._replace(sums=sums, squares=squares, amax=rows.amax(0))

    def _formats(self) -> dict[Slot, str]:
        """The formats of all operands by the present recipes, also of operands that are on other ranks alone."""
        formats, layers = dict[Slot, str](), {id(layer): layer for layer in self._layers}
        for (layer, _), name in self._names.items():
            plans = [("", layers[layer].passes.plan), *([] if self._other is None else [self._other])]
            for title, plan in plans:
                for tensor, direction in product(TENSORS, DIRECTIONS) if plan is not None else ():
                    formats[name, tensor, direction, title] = _format_of(getattr(plan, tensor), direction)
        return formats

    def readings(self) -> list[Reading]:
        """Return the statistics of all steps so far; the host waits for them."""
        for step, formats, *sums in self._pending:
            for slot, values, square, largest in zip(self._slots, *(one.tolist() for one in sums), strict=True):
                values_by_name = dict(zip(SUMS, values, strict=True), whole_square=square)
                name, tensor, direction, recipe = slot
                where = {"step": step, "layer": name, "tensor": tensor, "direction": direction, "recipe": recipe}
                if values_by_name["elements"] or values_by_name["square"]:
                    self._all.append(reading_of(values_by_name, largest, format=formats.get(slot, ""), **where))
        self._pending.clear()
        return self._all

    def write(self, path: str | Path) -> None:
        if self._ranks.rank == 0:
            super().write(path)

    def page(self, path: str | Path) -> None:
        if self._ranks.rank == 0:
            super().page(path)

    def tensorboard(self, directory: str | Path) -> None:
        if self._ranks.rank == 0:
            super().tensorboard(directory)


def _format_of(quantizer: Quantizer, direction: Direction) -> str:
    """The format of an operand; of one that is made of the row operand with both, as it has the errors of both."""
    made = direction == "col" and quantizer.col_source == "row"
    return (quantizer if made else quantizer.side(direction)).text


def _tokens(tensor: Observed, rows: SomeRows) -> Tokens:
    columns = [side.quantizer.basis for side in rows.how.sides if side.direction == "col" or side.is_both]
    if tensor.name == "w" or not columns:
        return None
    return *columns, tensor.together, *tensor.given.shape[:-1], len(rows.tensors[0])


def _names_of(model: nn.Module, patterns: Sequence[str]) -> dict[tuple[int, str], str]:
    """The names of the layers, and of the stacks of layers that have several, by the ``id`` of the module and the name
    of the stack."""
    places = {id(model.get_submodule(name)): [*map(plain_name, own)] for name, own in names_of(model).items()}
    keys = [(id(m), "") for m in model.modules() if isinstance(m, Layer)]
    keys += [(id(one.holder), one.key) for one in expert_stacks(model) if isinstance(one.holder, StatefulLayer)]
    every = {(of, key): [f"{place}.{key}".strip(".") for place in places[of]] for of, key in keys}
    if not every:
        raise NumericsError(f"{type(model).__name__} has no layer of lpq to watch: convert it first, lpq.convert")
    found = matching(patterns, [name for names in every.values() for name in names])
    if unmatched := [pattern for pattern, names in found.items() if not names]:
        known = listed([name for name, *_ in every.values()])
        raise NumericsError(f"numerics: no layer matches {unmatched[0]!r}; they are {known}")
    matched = {name for names in found.values() for name in names}
    return {key: names[0] for key, names in every.items() if matched.intersection(names)}
