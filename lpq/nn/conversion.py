"""Converting a model in place: plan what each module becomes, check it, and apply it. The report of what was done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast, get_args

from torch import jit, nn

from lpq import recipes
from lpq.distributed.model_check import ModelCheck
from lpq.nn.advice import warnings_of
from lpq.nn.called import READ, UNCALLED, read_past, uncalled
from lpq.nn.conversion_plan import BECAME, TAKEN, Change, ConversionPlan, changes_of, check_layers
from lpq.nn.converted_model import ConvertedModel
from lpq.nn.coverage import coverage, matrices
from lpq.nn.first_argument import Model, check_choices, check_flags, check_model, check_whole
from lpq.nn.fused_blocks import fuse as fuse_blocks
from lpq.nn.fused_blocks import is_converted
from lpq.nn.fused_blocks import notes as fusion_notes
from lpq.nn.layer_notes import expert_notes, parallel_notes
from lpq.nn.linear import Layer
from lpq.nn.names import plain_name
from lpq.nn.reports import WEIGHT, Entry, Report
from lpq.nn.sharded_weights import Weights, check_options, check_weights, prepare_weights, weight_notes, why_none_stored
from lpq.nn.siblings import SharedInputs
from lpq.nn.stages import Stages, last_change
from lpq.nn.stateful_layer import StatefulLayer, stateful_layers
from lpq.nn.undoing import undone_if_refused
from lpq.nn.unwrapping import inside_of
from lpq.nn.wanted import Accumulate
from lpq.recipes import Include, Policy, PolicyLike, Steps
from lpq.registry.warning import warn

RECORD = "lpq_conversion"
BEFORE = "lpq_before"
"""An attribute of modules that are no layers: the attributes that ``convert`` changed, as they were."""


@dataclass(frozen=True)
class Conversion:
    """The record that a converted model carries: its policy, the length of the run and the report."""

    policy: Policy
    steps: Steps
    report: Report
    weights: Weights | None = None
    ranks: int | None = None
    within: str = ""
    """The name of the module that has this record, in the model that was converted, if that was a wrapper."""

    def unwrapped(self) -> Conversion:
        """The record with the names that its entries have in the module that has it."""
        converted, others = (
            tuple(replace(entry, name=plain_name(entry.name).removeprefix(f"{self.within}.")) for entry in entries)
            for entries in (self.report.converted, self.report.left)
        )
        return replace(self, report=replace(self.report, converted=converted, left=others))


def convert(
    model: Model,
    policy: PolicyLike,
    *,
    steps: Steps = None,
    include: Include = None,
    weights: Weights | None = None,
    ranks: int | None = None,
    accumulate: Accumulate | None = None,
    fuse: bool = False,
) -> Model:
    """Convert the linear layers of ``model`` in place and return it.

    A model may be converted again. A policy that is one recipe leaves out layers with ``lm_head``, ``gate`` or
    ``router`` between the dots of their names. Any policy leaves out layers with fewer than 16 inputs or outputs,
    unless a rule matches such layers only; see ``lpq.policy``.

    Make the optimizer after this and after ``fully_shard``. A weight that is stored quantized keeps its format: rules
    that give it another one, at this step or a later one, are refused before anything is changed.

    Args:
        model: The model to convert.
        policy: A policy, or anything that makes a recipe: a name, the grammar, a mapping, a TOML file.
        steps: The length of the run, for rules that end at a fraction of it; see ``set_step``. ``"later"``: ``replan``
            gives it, as the callback for Hugging Face's Trainer does.
        include: ``"all"`` leaves nothing out by name or size.
        weights: How weights travel in a model that ``fully_shard`` shards afterwards. ``"high_precision"``: the shards
            stay as they are, and FSDP2 gathers their quantized form. ``"quantized"``: the shards themselves are stored
            quantized, and stepped through ``lpq.optim.MasterWeights``. ``None``: FSDP2 gathers in high precision,
            except for weights that an earlier call prepared, which stay so.
        ranks: The number of ranks that will share out the weights, for ``weights="quantized"``. A weight that cannot be
            cut for them stays in high precision.
        accumulate: Where backward adds the gradient of a weight in place, for micro-batches that are summed without
            autograd's help: ``"grad"`` adds to its ``.grad``, if that is there, and ``"main_grad"`` to its
            ``.main_grad``, in the dtype of that tensor. Post-accumulate-grad hooks of the weight are called after that,
            and its tensor hooks are called with ``None``. ``torch.autograd.grad`` returns gradients as ever, and adds
            to none.
        fuse: Whether blocks are fused, as ``lpq.fuse(model)`` does afterwards. Blocks that an earlier call fused stay
            so.
    """
    check_model(model)
    if isinstance(model, jit.ScriptModule):
        raise TypeError(f"model is a {type(model).__name__}, which is compiled: convert the module that it was made of")
    check_choices((None, *get_args(Accumulate)), accumulate=accumulate)
    check_flags("convert", fuse=fuse)
    prepared = _prepared(model, weights, ranks)
    check_options(weights, ranks, prepared[1])
    if accumulate is not None and weights is not None:
        raise ValueError(f"accumulate={accumulate!r} does not go with weights={weights!r}, which FSDP2 shards: use one")
    if weights is not None and any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ValueError(f"weights={weights!r} replaces what DistributedDataParallel reduces: convert before it")
    if steps not in (None, "later"):
        check_whole("convert", 1, steps=steps)
    original = recipes.policy(policy, include=include)
    plan = ConversionPlan.of(model, original, steps)
    policy = plan.policy
    modules = {name: model.get_submodule(name) for name in plan.schedules}
    check_layers(modules, plan.schedules, accumulate)
    check_weights(model, modules, weights, ranks, plan.schedules)
    with undone_if_refused(model):
        changes, converted, others = changes_of(model, plan)
        layers = {name: layer for c in changes if c.made_for is not None for name, layer in c.layers.items()}
        schedules = {name: change.schedule for change in changes for name in change.layers}
        check_layers(layers, schedules, accumulate)
        check_weights(model, layers, weights, ranks, schedules)
        model = cast(Model, _apply(model, plan, changes))
    every = [plain_name(alias) for aliases in plan.names.values() for alias in aliases]
    unmatched, unreached = policy.unmatched(every), policy.unreached(every, steps)
    covered = coverage(model, {entry.name for entry in converted})
    report = Report(tuple(converted), tuple(others), unmatched, unreached, original.misplaced(every), coverage=covered)
    warnings = [*warnings_of(policy, report, plan.names, plan.schedules, plan.without)]
    report = replace(report, left=tuple(entry for entry in others if matrices(model.get_submodule(entry.name))))
    inside, within = _inside(model, report)
    inside.__dict__[RECORD] = Conversion(policy, steps, report, *prepared, within)
    _connect_layers(model, accumulate, compares=weights is None)
    if weights is not None:  # nothing is kept to undo it: the former weights are freed one by one
        prepare_weights(model, weights, ranks)
    if weights == "quantized" and (converted or not unmatched) and (why := why_none_stored(model, ranks)) is not None:
        warnings.append(f"lpq.convert(…, weights='quantized') stored no weight quantized: {why}")
    if fuse and is_converted(model):
        fuse_blocks(model)
    for words in warnings:  # last, since a program may make errors of them
        warn(words)
    return model


def _prepared(model: nn.Module, weights: Weights | None, ranks: int | None) -> tuple[Weights | None, int | None]:
    """How weights are prepared, and for how many ranks: by this call or, if it leaves them alone, by earlier ones."""
    if weights is not None:
        return weights, ranks
    earlier = [record for *_, record in recorded(model) if record.weights is not None]
    return (earlier[0].weights, earlier[0].ranks) if earlier else (None, None)


def _inside(model: nn.Module, report: Report) -> tuple[nn.Module, str]:
    """The module inside of wrappers, such as PEFT's around a model with adapters, and its name in the model. A record
    lies there, since wrappers come and go: what ``merge_and_unload`` returns is what the wrapper held."""
    inside, name, within = model, "", ""
    while (inner := _inner_of(inside)) is not None:
        own = plain_name(next(name for name, module in inside.named_modules() if module is inner))
        name = f"{name}.{own}".strip(".")
        if name and not all(plain_name(e.name).startswith(f"{name}.") for e in (*report.converted, *report.left)):
            break  # the wrapper has layers of its own
        inside, within = inner, name
    return inside, within


def _inner_of(module: nn.Module) -> nn.Module | None:
    """The model that a wrapper is around; None: it is no wrapper."""
    if callable(unwrap := getattr(module, "get_base_model", None)):  # PEFT's
        inner = unwrap()
    elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = module.module
    else:
        inner = inside_of(module)
    return inner if isinstance(inner, nn.Module) and inner is not module else None


def _apply(model: nn.Module, plan: ConversionPlan, changes: Iterable[Change]) -> nn.Module:
    """Make the changes. Return the model, which may be another one."""
    for change in changes:
        change.apply()
        if not change.name:
            model = change.new
        elif change.new is not change.module:
            for alias in plan.names[change.name]:
                parent, _, leaf = alias.rpartition(".")
                setattr(model.get_submodule(parent), leaf, change.new)
    for module in model.modules():
        # In evaluation PyTorch's own Transformer layers would read the weights of linear layers, and not call them.
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Layer) for m in module.modules()):
            _set(module, "activation_relu_or_gelu", 0)
        if isinstance(module, nn.TransformerEncoder):
            _set(module, "use_nested_tensor", False)
    return model


def _set(module: nn.Module, name: str, value: object) -> None:
    vars(module).setdefault(BEFORE, {}).setdefault(name, getattr(module, name))
    setattr(module, name, value)


def _connect_layers(model: nn.Module, accumulate: Accumulate | None, *, compares: bool) -> None:
    """Give the layers of a model what they have in common: the step, the inputs, and whether ranks are compared."""
    layers = [*stateful_layers(model).values()]
    staged = [layer for layer in layers if layer.schedule is not None and len(layer.schedule.pieces) > 1]
    stages = Stages(model, last_change(layer.schedule for layer in staged)) if staged else None
    models: dict[object, ConvertedModel] = {}
    inputs, check = SharedInputs(), ModelCheck.of(model) if compares else None
    for layer in layers:
        fsdp = layer.model.fsdp  # weights that an earlier call prepared stay so
        layer.join(models.setdefault(fsdp, ConvertedModel(inputs, accumulate, stages, check, fsdp)))


# ------------------------------------------------------------------------------ the report


def conversions(model: nn.Module, *, built: bool = False) -> dict[str, Conversion]:
    """The record of the model, by its name; where several calls converted parts of it, the records of these parts.
    ``built``: a model that has layers with a recipe need not have a record."""
    check_model(model)
    by_name: dict[str, Conversion] = {}
    for name, record in records(model):
        if not any(name.startswith(f"{part}." if part else "") for part in by_name):
            by_name[name] = record
    if not by_name and not (built and any(_built(model))):
        raise ValueError(
            "the model was not converted: call lpq.convert(model, …) first, or pass the whole that it is part of"
        )
    return by_name


def records(model: nn.Module) -> Iterator[tuple[str, Conversion]]:
    """Every record in a model, with the name of the module that ``convert`` got or, if this was a wrapper that is gone,
    of the module that was in it."""
    for own, _, record in recorded(model):
        name = plain_name(own)
        if f".{name}".endswith(f".{record.within}"):
            yield name.removesuffix(record.within).removesuffix("."), record
        else:
            yield name, record.unwrapped()


def recorded(model: nn.Module) -> Iterator[tuple[str, nn.Module, Conversion]]:
    """Yield every module in a model that has a record, with its name there and the record."""
    for name, module in model.named_modules():
        if isinstance(record := vars(module).get(RECORD), Conversion):
            yield name, module, record


def report(model: nn.Module, *, full: bool = False) -> Report:
    """Report the modules that ``convert`` converted, those that it left alone and why, and how weights travel now. A
    layer that was built with a recipe, such as ``lpq.nn.Linear``, counts as converted.

    The text begins with how much of the model is converted. Once a pass has called some layers, those that it did not
    call are named, and count as not converted. Those that it called and whose weight another module has read besides
    are named, and count as converted.

    Args:
        model: The model, or a part of it.
        full: Give each module a line of its own. Modules with equal lines share one otherwise.
    """
    check_flags("report", full=full)
    parts = conversions(model, built=True)
    modules = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    idle = uncalled(model)
    past = read_past(model) - idle

    def named(part: str, entries: tuple[Entry, ...]) -> Iterator[Entry]:
        for entry in entries:
            yield replace(entry, name=plain_name(f"{part}.{entry.name}".strip(".")))

    def given(entry: Entry) -> Entry:
        end = UNCALLED if entry.name in idle else READ if entry.name in past else ""
        return replace(entry, note=entry.note + _given_since(modules.get(entry.name)) + end)

    def now(entry: Entry) -> Iterator[Entry]:
        """Find a converted module again: it may be gone since, or inside of another one, as with adapters, or in the
        place of the one that it was inside of, as after adapters were merged."""
        around = entry.name
        while around not in modules:
            around = around.rpartition(".")[0]
        if around != entry.name and _is_made(modules[around]):
            entry = replace(entry, name=around)
        module = modules.get(entry.name)
        names: list[str] = []
        for inner, part in module.named_modules() if module is not None else ():
            name = plain_name(f"{entry.name}.{inner}".strip("."))
            if _is_made(part) and not (names and f"{name}.".startswith(f"{names[-1]}.".lstrip("."))):
                names.append(name)
        yield from (given(replace(entry, name=name, note=_recipes(modules[name], entry.note))) for name in names)
        if not names:
            kind = "nn.Linear" if type(module) is nn.Linear else type(module).__name__
            became = f"replaced by an ordinary {kind}" if module is not None else "taken out of the model"
            yield replace(entry, note=f"{entry.note}; since then {became}")

    fused, apart = fusion_notes(model)
    prepared = [conversion.ranks for conversion in parts.values() if conversion.weights is not None]
    notes = weight_notes(model, prepared[0]) if prepared else ()
    converted = tuple(e for part, c in parts.items() for entry in named(part, c.report.converted) for e in now(entry))
    inside = tuple(f"{entry.name}.".lstrip(".") for entry in converted)
    converted += tuple(given(entry) for entry in _built(model) if not f"{entry.name}.".startswith(inside))
    kept = {name for name, m in modules.items() if _is_made(m) and not _given_since(m).endswith("left alone")}
    return Report(
        converted=converted,
        left=tuple(
            given(entry) for part, c in parts.items() for entry in named(part, c.report.left) if entry.name in modules
        ),
        unmatched=tuple(pattern for c in parts.values() for pattern in c.report.unmatched),
        unreached=tuple(number for c in parts.values() for number in c.report.unreached),
        misplaced=tuple(rule for c in parts.values() for rule in c.report.misplaced),
        weights=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in notes),
        parallel=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in parallel_notes(model)),
        experts=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in expert_notes(model)),
        fused=fused,
        apart=apart,
        uncalled=tuple(entry.name for entry in converted if entry.name in idle),
        read=tuple(entry.name for entry in converted if entry.name in past),
        coverage=coverage(model, {entry.name for entry in converted if entry.name in kept} - idle),
        full=full,
    )


def _built(model: nn.Module) -> Iterator[Entry]:
    """The layers that were built with a recipe, and to which no conversion has given a schedule."""
    for name, layer in stateful_layers(model).items():
        if layer.schedule is None and layer.recipe is not None:
            yield Entry(name, type(layer).__name__, _title(layer))


def _recipes(module: nn.Module, note: str) -> str:
    """A note with the recipes that the layers of this module have by their schedule, and which of them holds now."""
    layers = (m for m in module.modules() if isinstance(m, StatefulLayer) and m.schedule is not None)
    if (layer := next(layers, None)) is None or layer.schedule is None:
        return note
    planned = [recipe for _, recipe in layer.schedule.pieces]
    now = f"; now: {_title(layer)}" if len(planned) > 1 and layer.recipe in planned else ""
    return f"{layer.schedule}{now}{''.join(note.partition(BECAME)[1:])}"


def _title(layer: StatefulLayer) -> str:
    return layer.recipe.title if layer.recipe is not None else "left alone"


def _is_made(module: nn.Module) -> bool:
    """Whether a conversion made it: lpq or a plugin."""
    return isinstance(module, StatefulLayer) or TAKEN in vars(module)


def _given_since(module: nn.Module | None) -> str:
    """The end of a note: the recipe that a layer was given by hand in place of its policy's; else empty."""
    if not isinstance(module, StatefulLayer) or module.schedule is None:
        return ""
    if any(module.recipe == recipe for _, recipe in module.schedule.pieces):
        return ""
    return f"; since then {_title(module)}"
