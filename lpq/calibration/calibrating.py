"""``lpq.calibrate``: collect, reduce, freeze, and have weights searched where they are encoded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lpq.calibration import collecting
from lpq.calibration.collecting import MAGNITUDES, Forward, Pass, Progress, collect, histogram, tokens
from lpq.calibration.errors import CalibrationError
from lpq.calibration.freezing import Unseen, clipped, freeze, frozen_values
from lpq.calibration.parallel import Peers
from lpq.calibration.saved import SavedStatistics
from lpq.calibration.statistics import Statistics, Together, reduce
from lpq.calibration.targets import Target, forgotten, searches, targets
from lpq.checkpoint.model import Model, is_shared
from lpq.engines.siblings import FUSED, fused
from lpq.files.disk import place
from lpq.nn.first_argument import check_choices, check_flags, check_whole
from lpq.nn.stateful_layer import stateful_layers
from lpq.registry.showing import Readable, number
from lpq.registry.warning import warn
from lpq.torch_private.tensors import local_part

Bar = AbstractContextManager[Callable[[int], None]]
"""A progress bar; the context gives a function that takes the number of samples so far."""
Method = Literal["max", "percentile", "mse", "four_over_six"]
SEARCHING = ("mse", "four_over_six")
"""The methods that also search the scales of blocks of weights."""


@dataclass(frozen=True, repr=False)
class Calibrated(Readable):
    """A record of a calibration."""

    method: str
    samples: int
    """The number of samples that went through the model, of all ranks together; 0: no input has a static scale."""
    batches: int
    values: Mapping[str, Tensor]
    """The static statistics, by the name of the layer and of its buffer: ``blocks.0.up_proj.x_amax``."""
    layers: tuple[str, ...]
    searched: tuple[str, ...]
    """The layers in which scales of blocks of the weight are searched."""
    left: tuple[str, ...] = ()
    """The layers with a recipe that measure all as before: they have no scale of a whole tensor."""

    def __str__(self) -> str:
        """A line for people to read."""
        where = number(len(self.layers), "layer")
        text = f"static scales by {self.method} in {where}, from {number(self.samples, 'sample')}"
        if not self.samples:
            text = f"static scales of weights alone in {where}: inputs are measured as before, so no batch was read"
        text += f"; scales of blocks are searched in {len(self.searched)}" if self.searched else ""
        return f"{text}; all is measured as before in {number(len(self.left), 'layer')}" if self.left else text

    __repr__ = __str__


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: Method = "max",
    samples: int = 512,
    percentile: float = 99.9,
    siblings: Sequence[Sequence[str]] = FUSED,
    unseen: Unseen = "siblings",
    forward: Forward = collecting.through,
    state: str | Path | None = None,
    every: int = 16,
    progress: bool = True,
    process_group: ProcessGroup | None = None,
) -> Calibrated:
    """Make the scales of inputs and weights static, in place, from the batches that go through ``model``; return a
    record.

    The layers get static recipes, for training, evaluation and ``lpq.export``. All ranks that share the model call
    this. If ranks do not share it, rank 0 calls it alone, or all with
    ``process_group=torch.distributed.group.WORLD``. The model runs in evaluation, without gradients, under the recipes
    that it has, but for scales that are static already.

    Args:
        model: A model that ``lpq.convert`` converted, sharded or not.
        batches: Tensors, sequences of arguments or mappings of them, each with samples along the first dimension of its
            first tensor. Each rank has batches of its own; ranks of one layer under tensor parallelism have the same
            ones.
        method: ``"max"`` takes the largest magnitude. ``"percentile"`` cuts off the elements of inputs beyond a
            percentile, and goes through the batches twice. ``"mse"`` and ``"four_over_six"`` search the scale of each
            block of a weight, where its format has some, with the largest magnitudes for all else.
        samples: The number of samples of all ranks together. Calibration ends with the batch that completes them.
        percentile: The percentage of the elements of inputs that are not cut off, for ``method="percentile"``.
        siblings: Groups of layers that engines fuse if they are beside each other, and that therefore get one scale:
            the last parts of their names, or patterns of these.
        unseen: ``"siblings"``: layers that no token went through get the input scales of their siblings, with a
            warning. ``"error"``: they are an error.
        forward: ``forward(model, batch)`` calls the model in another way than with the arguments of the batch.
        state: A file in which statistics are kept. A call that finds it goes on from there, with the same batches on
            any number of ranks that they are dealt out to in turn.
        every: The number of rounds after which ``state`` is written.
        progress: Show a bar, in a terminal.
        process_group: The ranks that calibrate together; None: the ranks that share the model.
    """
    ranks = Together.of(process_group, is_shared(model), "calibrates", first=True)

    def prepare() -> tuple[list[Target], tuple[str, ...], Peers, Path | None]:
        check_flags("calibrate", CalibrationError, progress=progress)
        _check(method, samples, percentile, unseen, every, batches)
        _check_forms(siblings, forward)
        search = method if method in SEARCHING else None
        chosen = targets(model, search)
        _check_targets(model, chosen, siblings)
        if method == "percentile" and not any(target.names("x") for target in chosen):
            raise CalibrationError(
                'method="percentile" cuts scales of inputs, and here no input has a scale of a whole tensor. Use '
                'method="max", for the scales of weights'
            )
        file = place(state, "state") if state is not None else None
        return chosen, _searched(chosen, search), Peers(model), file

    chosen, searched, team, file = ranks.each(prepare)
    counts = len(team.ranks) if method == "percentile" and any(t.layer not in team.layers for t in chosen) else 1
    options = {"method": method, "percentile": percentile, "samples": samples}
    others = {"siblings": sorted(map(tuple, siblings)), "unseen": unseen}
    facts = [f"{name}={value!r}" for name, value in {**options, **others}.items()]
    ranks.equal(facts, "the ranks calibrate in other ways", "Call lpq.calibrate alike on all of them")
    settings = {**options, "ranks that share layers": counts}
    saved = SavedStatistics(file, settings, ranks)
    run = partial(collect, model, chosen, batches, samples=samples, forward=forward, ranks=ranks, team=team)
    bar = partial(_bar, samples, visible=progress and ranks.rank == 0)
    with _as_collected(model, chosen), team.whole():
        statistics, so_far = Statistics(), Progress()
        clips: dict[str, Tensor] = {}
        if any(target.names("x") for target in chosen):
            passes = ("magnitudes", "statistics") if method == "percentile" else ("statistics",)
            for name in passes:
                how = MAGNITUDES if name == "magnitudes" else collecting.take_statistics(clips)
                own = _zeros(model, chosen, how)
                so_far = _pass(run, bar, how, own, saved, every)
                statistics = reduce(own, ranks)
                if name == "magnitudes":
                    clips = clipped(statistics, chosen, percentile)
        statistics = _with_weights(statistics, chosen, ranks)
        values = frozen_values(statistics, chosen, siblings, unseen)
    freeze(model, chosen, values)
    names, frozen = tuple(target.name for target in chosen), {id(target.layer) for target in chosen}
    layers = stateful_layers(Model(model).module).items()
    rest = tuple(name for name, layer in layers if layer.recipe is not None and id(layer) not in frozen)
    return Calibrated(method, so_far.samples, so_far.batches, values, names, searched, rest)


def _searched(chosen: Sequence[Target], search: str | None) -> tuple[str, ...]:
    """The layers in which scales of blocks of the weight are searched; an error if a search is wanted and there is no
    such layer."""
    searched = tuple(target.name for target in chosen if search is not None and searches(target, search))
    if search is not None and not searched:
        raise CalibrationError(
            f"method={search!r} searches scales of blocks of weights, and here there are none: that is for formats "
            'with an option search or a searched_by, and weights that are not stored quantized. Use method="max"'
        )
    return searched


def _pass(
    run: Callable[..., Progress], bar: Callable[[str], Bar], how: Pass, own: Statistics, saved: SavedStatistics,
    every: int,
) -> Progress:  # fmt: skip
    """Do one pass over the batches, by ``run``; it goes on where the state of an earlier one was kept."""
    begin = saved.restore(how.name, own)
    rounds = 0
    with bar(how.name) as move:

        def after(so_far: Progress) -> None:
            nonlocal rounds
            rounds += 1
            move(so_far.samples)
            if rounds % every == 0:
                saved.keep(how.name, own, so_far.batches)

        so_far = run(how, statistics=own, begin=begin, after=after)
    saved.keep(how.name, own, so_far.batches)
    return so_far


def _zeros(model: nn.Module, chosen: Sequence[Target], how: Pass) -> Statistics:
    """Empty statistics: all ranks have the same ones, whichever rank has which batch and layer."""
    own, device = Statistics(), next(model.parameters()).device
    for target in chosen:
        if not target.names("x"):
            continue
        own.take(tokens(target), torch.zeros((), dtype=torch.int64, device=device))
        if how is MAGNITUDES:
            own.take(histogram(target), torch.zeros(collecting.BINS, dtype=torch.int64, device=device))
        else:
            for name in target.names("x"):
                own.take(name, torch.zeros((), dtype=torch.float32, device=device))
    return own


@torch.no_grad()
def _with_weights(statistics: Statistics, chosen: Sequence[Target], ranks: Together) -> Statistics:
    own = Statistics()
    for target in chosen:
        for name, value in target.measured_weight():
            own.take(name, value)
    for name, value in reduce(own, ranks).items():
        statistics.take(name, value)
    return statistics


@contextmanager
def _as_collected(model: nn.Module, chosen: Sequence[Target]) -> Iterator[None]:
    """Have the model evaluate inside, not compiled and with no static scale; if that fails, restore it."""
    before = [
        (layer, layer.recipe, {name: local_part(value).clone() for name, value in layer.static_values().items()})
        for layer in {id(target.layer): target.layer for target in chosen}.values()
    ]
    with collecting.evaluating(model):
        try:
            for target in chosen:
                target.layer.take_recipe(target.dynamic)
            yield
        except BaseException:
            for layer, recipe, values in before:
                layer.take_recipe(recipe)
                for name, buffer in layer.static_values().items():
                    local_part(buffer).copy_(values[name])
            raise


@contextmanager
def _bar(samples: int, title: str, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; yields a function that takes the number of samples so far."""
    if not (visible and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress as Shown

    with Shown(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"calibrating: {title}", total=samples)
        yield lambda count: bar.update(task, completed=min(count, samples))


def _check(method: str, samples: int, percentile: float, unseen: str, every: int, batches: object) -> None:
    check_choices(get_args(Method), CalibrationError, method=method)
    check_choices(get_args(Unseen), CalibrationError, unseen=unseen)
    check_whole("calibrate", 1, CalibrationError, samples=samples, every=every)
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 50 <= percentile <= 100:
        raise CalibrationError(f"percentile={percentile!r}: it is a number from 50 to 100, such as 99.9")
    if not isinstance(batches, Iterable):
        raise CalibrationError(f"batches is of type {type(batches).__name__}: it is a list, a DataLoader or the like")
    if isinstance(batches, Tensor):
        raise CalibrationError(
            f"batches is a tensor {list(batches.shape)}, whose rows would each be a batch: pass a list, [tensor]"
        )
    if method == "percentile" and iter(batches) is batches:
        raise CalibrationError(
            'method="percentile" goes through the batches twice, and an iterator gives them once: pass a list or a '
            "DataLoader that gives the same ones again"
        )


def _check_targets(model: nn.Module, chosen: Sequence[Target], siblings: Sequence[Sequence[str]]) -> None:
    remark = forgotten(model)
    if not chosen:
        raise CalibrationError(
            f"no layer has a scale that can become static: {remark}"
            if remark
            else "no layer has a scale of a whole tensor, which could become static: was the model converted? Scales "
            "of blocks and rows follow their tensors at each step, and such a model is exported without calibration"
        )
    if remark:
        warn(remark)
    for group in siblings if siblings is not FUSED else ():
        if not fused([target.name for target in chosen], [group]):
            raise CalibrationError(
                f"siblings has {tuple(group)}, and the model has no two layers of such names beside each other, with a "
                "scale of a whole tensor"
            )


def _check_forms(siblings: object, forward: object) -> None:
    groups = siblings if isinstance(siblings, Iterable) and not isinstance(siblings, str) else (siblings,)
    if any(isinstance(g, str) or not isinstance(g, Iterable) or not all(isinstance(n, str) for n in g) for g in groups):
        raise CalibrationError(
            f"siblings={siblings!r}: it is a list of groups of names, as [('query', 'key', 'value')]"
        )
    if not callable(forward):
        raise CalibrationError(f"forward={forward!r}: it is a function that calls the model, forward(model, batch)")
