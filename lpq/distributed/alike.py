"""A check that the ranks which share a model have the same one: different recipes would be mixed in silence.

They compare one hash before weights or operands travel, and when a recipe has changed; and again and again, in a
collective of a few words, while a later step may change one. Where it differs, they exchange descriptions of their
models, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpq.distributed import meeting
from lpq.distributed.ranks import LIMIT, Ranks, digest, sharing, words
from lpq.distributed.replicas import Replicas
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.collectives import all_reduce
from lpq.torch_private.dispatch import modes
from lpq.torch_private.styles import SHARED_OUT

OFTEN = 1.0
"""Seconds between two looks whether another rank has changed a recipe."""
DIFFER = "the ranks do not have the same model"
REMEDY = "Build, convert and share out the model, and call lpq.set_step, alike on all ranks"


class SharedLayer(Protocol):
    """A layer, as far as ranks change it together."""

    bias: Any

    @property
    def title(self) -> str:
        """The name of the layer in messages."""

    def shared_weight(self) -> Tensor:
        """The weight, as ranks share it."""


def is_converted(module: nn.Module) -> bool:
    """Whether it is a layer of ``lpq.nn``, which has a ``model``, ``passes``, a ``schedule`` and a recipe."""
    return hasattr(type(module), "state_buffers")


def converted(root: nn.Module) -> Iterator[Any]:
    """Yield the layers of ``lpq.nn`` in a module."""
    return filter(is_converted, root.modules())


class Comparison:
    """This rank's knowledge of the other ranks' models, at one place at which ranks compare them."""

    def __init__(self, replicas: Replicas | None = None) -> None:
        """``replicas``: the wrappers of DistributedDataParallel whose ranks are compared as well."""
        self._replicas = replicas
        self.alike = False
        """Whether there is nothing to compare until a recipe changes."""
        self.moving = False
        """Whether later steps might change a recipe, on all ranks: so all compare their steps at this place again."""
        self.first: Callable[[], object] = lambda: None
        """Return the layer or the gather before which ranks compared last; there they compare steps in each forward."""
        self.withholds = False
        """Whether this rank keeps a recipe that it was to change without the others."""
        self.sets: list[Ranks] = []
        """The sets of ranks that share a part of the model; none before they have compared."""
        self._stages: list[Any] = []
        """The steps of the policies of its layers."""
        self._about = ""
        self._waited, self._looked = 0.0, 0.0
        """How long this rank has waited in vain, and when it looked last, in seconds."""

    def compare(self, part: nn.Module, seconds: float | None = None, *, steps: bool = True) -> None:
        """Compare the model around ``part``, unless its steps alone can differ, and are equal. Raise on all ranks if
        models differ. ``seconds``: how long this rank waits for the others. After that it goes on, as they do, and
        compares later. ``steps``: whether all ranks come here while steps may change recipes."""
        from lpq.torch_private import fsdp  # which imports FSDP2

        alike = self.alike and not self.withholds
        at = f"{alike}, steps {[stages.step for stages in self._stages]}"
        if self.moving and steps and are_equal(at, self.sets) and alike:
            return
        around = fsdp.outermost(part)  # a part of a model may have been converted, and the whole sharded
        if self._replicas is not None:  # ranks may come for another model
            self._about = f"{digest(' '.join(name for name, _ in around.named_modules())):x}"
        # FSDP2 brings all ranks to the same first gather, whatever their models. There a rank with weights=None, which
        # compares in its first pass, meets a rank that compares before it gathers.
        first = not self.sets and (self._replicas is None or not self._replicas.noted)
        was, self.alike = self.alike, False  # where they differ
        sets = check_alike(around, self._replicas, "" if first else self._about, seconds)
        if sets is None:
            self.alike = was
            self._waited += seconds or 0.0
            if self._waited > meeting.limit():
                raise in_vain(self._waited)
            return
        self.sets, self.withholds, self._waited = sets, False, 0.0
        self._stages = [*dict.fromkeys(stages for layer in converted(around) if (stages := layer.model.stages))]
        self.moving = bool(sets) and any(stages.moving for stages in self._stages)
        self.alike = True

    @property
    def relied_on(self) -> bool:
        """Whether ranks have compared, and do so again only after a change that each of them knows of."""
        return bool(self.sets) and not self.moving

    def forget(self) -> bool:
        """Compare again, since a recipe has changed. Return whether that is new."""
        was, self.alike = self.alike, False
        return was

    def withhold(self) -> None:
        """Have all ranks compare before a step of an optimizer, as this rank keeps a recipe that it was to change."""
        self.withholds = True
        self.tell()

    def tell(self) -> None:
        """Tell the other ranks, whose recipes may be unchanged, that this rank wants to compare."""
        for ranks in self.sets:
            meeting.tell(ranks.names, self._about)

    def is_told(self, now: bool) -> bool:
        """Whether another rank wants to compare; ``now``: look even if this rank has just looked."""
        if not now and monotonic() < self._looked + OFTEN:
            return False
        self._looked = monotonic()
        return any(meeting.is_told(ranks.names, self._about) for ranks in self.sets)


def check_alike(
    root: nn.Module, replicas: Replicas | None = None, about: str = "", seconds: float | None = None
) -> list[Ranks] | None:
    """Raise on all ranks if ranks that share a layer of this model have different models; return the sets of ranks.
    Ranks meet once for each set, and once more where there are several sets. Return None, on all ranks, if not all came
    within ``seconds``; if ``seconds`` is None, wait for all."""
    by_ranks: dict[tuple[int, ...], tuple[Ranks, list[str]]] = {}
    for text, params, device in _layers(root):
        for ranks in sharing(params, () if replicas is None else replicas.of(params), device):
            by_ranks.setdefault(tuple(ranks.names), (ranks, []))[1].append(text)
    return compare_in_store(by_ranks.values(), about, (DIFFER, REMEDY, _waiting()), seconds)


def compare_in_store(
    by_ranks: Iterable[tuple[Ranks, list[str]]], about: str, say: tuple[str, str, str], seconds: float | None = None
) -> list[Ranks] | None:
    """Raise on all of these ranks unless the ranks of each set have the same texts; return the sets, or None as
    ``check_alike``. ``say``: the error's beginning, its end, and the words of a rank that waits long or in vain."""
    (differ, remedy, waiting), sets = say, []
    error: RuntimeError | None = None
    for ranks, texts in by_ranks:
        equal = meeting.meet(ranks.names, about, f"{digest(chr(10).join(texts)):x}", seconds, waiting)
        if equal is None and seconds is None:
            raise RuntimeError(f"this rank has waited {meeting.limit():.0f} s: {waiting}")
        if equal is None:
            return None
        sets.append(ranks)
        try:
            if not equal:
                ranks.equal(texts, differ, remedy)
        except RuntimeError as raised:
            error = error or raised
    # Nobody leaves before all have compared.
    differ_elsewhere = len(sets) > 1 and not are_equal(str(error is not None), sets)
    if error is None and differ_elsewhere:
        others = "other ranks, with which this one shares other layers, say where they differ"
        error = RuntimeError(f"{differ}: {others}. {remedy}")
    if error is not None:
        raise error
    return sets


def are_equal(text: str, sets: Sequence[Ranks]) -> bool:
    """Whether all of these ranks, which all call this, pass the same text; a collective for each dimension of each
    set."""
    own = words(text)
    both = torch.tensor([*own, *(LIMIT - word for word in own)], dtype=torch.int32)
    with waiting_for_ranks():
        for ranks in sets:
            for group in ranks.groups:
                both = all_reduce(both.to(ranks.device), "max", group)
        pairs = both.view(2, -1).tolist()
    return all(a + b == LIMIT for a, b in zip(*pairs, strict=True))


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Say in words, inside of this, that a collective takes long, or that a rank of it is gone."""
    waits = Timer(meeting.PATIENCE, lambda: warn(_waiting()))
    waits.daemon = True
    waits.start()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "ranks compare recipes that are new before weights or operands travel or, where none does, before an "
            f"optimizer writes to weights, and another rank did not, or is gone. {REMEDY}, before the same forward "
            f"({error})"
        ) from error
    finally:
        waits.cancel()


def agree(
    facts: Sequence[str], mesh: DeviceMesh, differ: str = DIFFER, also: str = "", refused: Exception | None = None
) -> bool:
    """Raise on all ranks of a mesh, each of which has a part of a model or an input that is new to it, unless their
    facts about it are equal; return whether ``also``, too, is. Where the host would wait for a device they meet in the
    store. There, if not all come, a rank that refuses its own raises soon, and another one after a long time."""
    ranks = Ranks(mesh, device=torch.device(mesh.device_type))
    text, own = "\n".join([also, *facts]), f"{facts[0]}. Give each rank a part of the same size. {REMEDY}"
    if mesh.device_type in meeting.FREE:
        equal: bool | None = are_equal(text, [ranks])
    else:
        seconds = None if refused is None else meeting.SOON
        equal = meeting.meet(ranks.names, "news", f"{digest(text):x}", seconds, f"{_NEWS}: {own}")
    if equal is None and refused is not None:
        refused.add_note("Not all ranks have come to compare their inputs: the others wait until this process ends.")
        raise refused
    if equal is None:
        raise RuntimeError(f"{_NEWS}, for {meeting.limit():.0f} s: {own}")
    if not equal:
        ranks.equal(facts, differ, REMEDY)
    return equal


_NEWS = "this rank waits to compare a layer or an input that is new with the other ranks', of which not all have come"


def check_part(module: nn.Module, how: str, mesh: DeviceMesh) -> None:
    """Raise on all ranks of a mesh that is about to shard a part of a model, unless they have the same part, and shard
    it in the same way: torch would send tensors that not all ranks have, or join parts that do not fit."""
    if hasattr(module, SHARED_OUT):
        raise ValueError(f"{getattr(module, 'title', type(module).__name__)}: it has a style already: give it only one")
    if mesh.ndim != 1 or mesh.size() == 1 or modes():  # as where all tensors are fake
        return
    agree(description(module, how).split("\n"), mesh)


def description(module: nn.Module, how: str = "") -> str:
    """A description of a module, or of the converted layers in it, that must be equal on all ranks. ``how``: how they
    are to be shared out; then all tensors, which torch sends, belong to it."""
    texts, name = [], getattr(module, "qualified_name", "") or type(module).__name__
    for place, part in module.named_modules(prefix=name):
        own = [p for p in part._parameters.values() if p is not None]  # torch's walk takes as long as all else
        if is_converted(part) and (params := own or [*part.parameters()]):
            texts.append(_describe(getattr(part, "qualified_name", "") or place, part, params) + how)
    texts = texts or [f"{name}: {type(module).__name__}, not converted{how}"]
    for named in (module.named_parameters, module.named_buffers) if how else ():
        texts += [f"{key}: {[*t.shape]} of {t.dtype}" for key, t in named(name, remove_duplicate=False)]
    return "\n".join(texts)


class CachedDescription:
    """The description of a part of a model, which ranks compare often. It is rebuilt once the part has changed."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._layers: list[Any] = [*converted(part)]
        self._was: list[tuple[object, ...]] = []
        self._texts: dict[object, tuple[int, str]] = {}

    def with_rows(self, rows: Tensor) -> tuple[int, str]:
        """The description, with the rows added, and its hash."""
        if (now := [*map(_state, self._layers)]) != self._was:
            self._was = now
            self._texts.clear()
        grad, device = torch.is_grad_enabled(), rows.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = (rows.shape[1:], rows.dtype, grad, grad and rows.requires_grad, cast)
        if (entry := self._texts.get(kind)) is None:
            gradient = f"{'with' if kind[3] else 'without'} a gradient" if grad else "where no gradient is computed"
            under = "" if cast is None else f", under autocast to {cast}"
            text = f"rows of {[*rows.shape[1:]]} {rows.dtype} {gradient}{under}\n{description(self._part)}"
            entry = self._texts[kind] = digest(text), text
        return entry


def _state(layer: Any) -> tuple[object, ...]:
    """All of a converted layer that its description has and that may change."""
    stages, weight = layer.model.stages, next(iter(layer._parameters.values()), None)
    step = None if stages is None else (stages.step, stages.was_set)
    of_weight = None if weight is None else (weight.shape, weight.dtype, weight.requires_grad)
    return layer.recipe, layer.schedule, step, getattr(layer, "dispatched", None), of_weight


def _layers(root: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], torch.device]]:
    """The layers whose weight FSDP2 shards, and all that are converted: a description, parameters, and the device."""
    from lpq.distributed.shard import WeightShard
    from lpq.torch_private import fsdp

    names = {module: name for name, module in root.named_modules()}
    weights, sharded = fsdp.sites(root, "weight"), fsdp.sites(root)
    for module in dict.fromkeys([*weights, *filter(is_converted, names)]):
        site = weights.get(module, sharded.get(module))
        params = [site.param] if site is not None else [*module.parameters()]
        if not params:
            continue
        how, dtype, device = "", params[0].dtype, params[0].device
        if site is not None:
            local, dtype, device = site.local, site.dtype, site.device
            high = ", gathered quantized" if isinstance(local, WeightShard) else ", in high precision"
            how = f", stored as {local.quantizer}" if isinstance(local, QuantizedTensor) else high
        yield _describe(names[module], module, params, dtype, how), params, device
        for key, parameter in module._parameters.items():
            if key != "weight" and parameter is not None:  # it is gathered with the weight
                end = "" if parameter.requires_grad else ", frozen"
                yield f"{names[module]}.{key}: {[*parameter.shape]}{end}".lstrip("."), params, device


def _describe(
    name: str, module: nn.Module, params: Iterable[Tensor], dtype: torch.dtype | None = None, how: str = ""
) -> str:
    """A description of a layer that must be equal on all ranks: its name, class, recipe and so on."""
    kind, (weight, *_) = type(module).__name__.removeprefix("FSDP"), params
    how += "" if weight.requires_grad else ", frozen"
    text = f"{name}: {kind} with a weight {[*weight.shape]} of {dtype or weight.dtype}{how}"
    if not is_converted(module):
        return text
    layer: Any = module
    text += f", recipe {layer.recipe.text if layer.recipe is not None else None}{layer.passes.withheld}"
    if (layouts := getattr(module, "layouts", None)) is not None:
        text += f", input {layouts.input}, output {layouts.output}"
    if (dispatched := getattr(module, "dispatched", None)) is not None:
        text += f", rows dispatched {'encoded' if dispatched.encoded else 'in high precision'}"
    schedule, stages = layer.schedule, layer.model.stages
    if schedule is None or len(schedule.pieces) == 1:
        return text
    at_step = stages is not None and stages.was_set
    return f"{text}, at step {stages.step} of ({schedule})" if at_step else f"{text}, before lpq.set_step"


def _waiting() -> str:
    return (
        f"ranks compare their models before weights or operands travel or, with weights=None, before an optimizer "
        f"writes to weights, and another rank has not for {meeting.PATIENCE:.0f} s. It is late, or it never will: if a "
        "recipe was changed on this rank alone, with another weights=, or if its model was not converted. " + REMEDY
    )


def in_vain(seconds: float) -> RuntimeError:
    return RuntimeError(
        f"this rank has waited {seconds:.0f} s to compare its model with the other ranks', and not all of them have "
        "come: a recipe or a step was changed on this rank alone, or others have another weights= or a model that was "
        f"not converted. {REMEDY}"
    )
