"""Converting a model: give each linear layer the recipe that a policy gives it, in place, and report what was done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from torch import nn

from lpq import recipes, registry
from lpq.distributed.model_check import ModelCheck
from lpq.nn.accumulation import Accumulate
from lpq.nn.advice import warnings_of
from lpq.nn.called import READ, UNCALLED, read_past, uncalled
from lpq.nn.converted_model import ConvertedModel
from lpq.nn.coverage import coverage, matrices
from lpq.nn.exclusions import convertible, exclusions
from lpq.nn.expert_notes import expert_notes
from lpq.nn.first_argument import check_model
from lpq.nn.functional import why_not_in_groups
from lpq.nn.fused_experts import adopt as adopt_experts
from lpq.nn.fused_experts import holds_experts, is_transposed, stacks
from lpq.nn.linear import Layer, Linear
from lpq.nn.names import plain_name
from lpq.nn.parallel_notes import parallel_notes
from lpq.nn.plan import Plan
from lpq.nn.quantizer_state import check_names
from lpq.nn.reports import WEIGHT, Entry, Report
from lpq.nn.sharded_weights import Weights, check_options, check_weights, prepare_weights, weight_notes, why_none_stored
from lpq.nn.siblings import SharedInputs
from lpq.nn.stages import Stages, last_change
from lpq.nn.stateful_layer import StatefulLayer
from lpq.nn.transposed import TransposedLayer, adopt, holds_transposed
from lpq.operations.inputs import DTYPES
from lpq.recipes import RecipeError, Schedule
from lpq.registry.errors import LpqError
from lpq.registry.warning import warn

if TYPE_CHECKING:
    from lpq.recipes import Include, Policy, PolicyLike, Recipe, Steps

RECORD = "lpq_conversion"
TAKEN = "lpq_recipe"
"""An attribute of modules that a plugin made: the title of the recipe that each was made for."""
LEFT_ALONE = Schedule(((None, None),))
NO_RECIPE = "the policy gives it no recipe"


@dataclass(frozen=True)
class Conversion:
    """The record that a converted model carries: its policy, the length of the run and the report."""

    policy: Policy
    steps: Steps
    report: Report
    weights: Weights | None = None
    ranks: int | None = None


class _LinearConverter:
    """lpq's own implementation of the hook, called after every plugin's."""

    @registry.hookimpl(trylast=True)
    def lpq_convert_module(self, module: Any, fqn: str, recipe: Recipe) -> Any:
        if "forward" in vars(module):
            return None
        if type(module) is nn.Linear:
            return Linear.adopt(module, recipe)
        if holds_transposed(module):
            return adopt(module, recipe)
        return adopt_experts(module, recipe) if holds_experts(module) else None


OWN = _LinearConverter()


def convert(
    model: nn.Module,
    policy: PolicyLike,
    *,
    steps: Steps = None,
    include: Include = None,
    weights: Weights | None = None,
    ranks: int | None = None,
    accumulate: Accumulate | None = None,
) -> nn.Module:
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
    """
    check_model(model)
    if accumulate not in (None, *get_args(Accumulate)):
        raise ValueError(f"accumulate={accumulate!r}: it is 'grad', 'main_grad' or None")
    prepared = _prepared(model, weights, ranks)
    check_options(weights, ranks, prepared[1])
    if accumulate is not None and weights is not None:
        raise ValueError(
            f"accumulate={accumulate!r} does not work with weights={weights!r}, which FSDP2 shards: use one"
        )
    if steps not in (None, "later"):
        check_length(steps)
    policy = recipes.policy(policy, include=include)
    names, without, schedules = schedules_of(model, policy, steps)  # all, before any swap
    check_layers(model, schedules, accumulate)
    check_weights(model, weights, ranks, schedules)
    model, converted, left = _convert_modules(model, names, schedules, without)
    _close_shortcuts(model)
    every = [plain_name(alias) for aliases in names.values() for alias in aliases]
    unmatched, unreached = policy.unmatched(every), policy.unreached(every, steps)
    covered = coverage(model, {entry.name for entry in converted})
    report = Report(tuple(converted), tuple(left), unmatched, unreached, coverage=covered)
    for words in warnings_of(policy, report, names, schedules, without):
        warn(words)
    report = replace(report, left=tuple(entry for entry in left if matrices(model.get_submodule(entry.name))))
    model.__dict__[RECORD] = Conversion(policy, steps, report, *prepared)
    _connect_layers(model, accumulate, compares=weights is None)
    if weights is not None:
        own = {n: m.schedule for n, m in model.named_modules() if isinstance(m, Layer) and m.schedule is not None}
        check_weights(model, weights, ranks, own)  # now also those of layers that a plugin made
        prepare_weights(model, weights, ranks)
    if (
        weights == "quantized"
        and (converted or not unmatched)
        and (reason := why_none_stored(model, ranks)) is not None
    ):
        warn(f"lpq.convert(…, weights='quantized') stored no weight quantized: {reason}")
    return model


def schedules_of(
    model: nn.Module, policy: Policy, steps: Steps = None
) -> tuple[dict[str, list[str]], dict[str, str], dict[str, Schedule]]:
    """The names of all modules, those that are left out and why, and the recipes that a policy gives to each."""
    names = names_of(model)
    without = exclusions(model, names, policy)
    schedules = {
        name: LEFT_ALONE if name in without else _schedule(policy, aliases, steps) for name, aliases in names.items()
    }
    return names, without, schedules


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Every module's first name, and all its names: a module may be in several places."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(first.setdefault(id(module), name), []).append(name)
    return names


def _prepared(model: nn.Module, weights: Weights | None, ranks: int | None) -> tuple[Weights | None, int | None]:
    """How weights are prepared, and for how many ranks: by this call or, if it leaves them alone, by earlier ones."""
    if weights is not None:
        return weights, ranks
    records = (module.__dict__.get(RECORD) for module in model.modules())
    earlier = [r for r in records if isinstance(r, Conversion) and r.weights is not None]
    return (earlier[0].weights, earlier[0].ranks) if earlier else (None, None)


def check_length(steps: object) -> None:
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps={steps!r}: it is the length of the run in steps, from 1 on")


def _schedule(policy: Policy, aliases: list[str], steps: Steps) -> Schedule:
    first, *others = map(plain_name, aliases)
    schedule = policy.schedule(first, steps)
    for other in others:
        if policy.schedule(other, steps) != schedule:
            raise RecipeError(
                f"{first!r} and {other!r} are one and the same module, and the policy gives them different recipes: "
                f"{schedule}; {policy.schedule(other, steps)}. Have one rule match both"
            )
    return schedule


def check_layers(model: nn.Module, schedules: Mapping[str, Schedule], accumulate: Accumulate | None = None) -> None:
    """Refuse what layers cannot be given, at this step or a later one, before anything is changed."""
    for name, schedule in schedules.items():
        module = model.get_submodule(name)
        planned = {recipe for _, recipe in schedule.pieces if recipe is not None}
        holds = holds_experts(module)
        if not planned or not (holds or convertible(module)):
            continue
        transposed = is_transposed(module) if holds else holds_transposed(module) or isinstance(module, TransposedLayer)
        if accumulate is not None and transposed:
            raise ValueError(
                f"accumulate={accumulate!r} is for weights of [out, in], and that of {name or 'the layer'} "
                f"({type(module).__name__}) is [in, out]: leave accumulate out, or have the policy give it no recipe"
            )
        weights: Mapping[str, Any] = stacks(module) if holds else {"weight": module.weight}
        for key, weight in weights.items():
            if weight.dtype not in DTYPES:
                raise TypeError(
                    f"{name or 'the layer'}: its {key} is {weight.dtype}; float32, bfloat16 and float16 can be "
                    "encoded: cast the model first, or have the policy give this layer no recipe"
                )
        own = module.memories() if isinstance(module, StatefulLayer) else ()
        why_unfit = why_not_in_groups if holds else getattr(module, "why_unfit", None)
        for recipe in planned:
            if why_unfit is not None and (why := why_unfit(Plan.of(recipe))) is not None:
                raise RecipeError(f"{name or 'the layer'} cannot have the recipe {recipe.title}: {why}")
            check_names(module, recipe, own, name or "the layer")


def _convert_modules(
    model: nn.Module, names: Mapping[str, list[str]], schedules: Mapping[str, Schedule], without: Mapping[str, str]
) -> tuple[nn.Module, list[Entry], list[Entry]]:
    """Convert the modules of a model, except those ``without`` a recipe for these reasons. Return the model, which may
    be another one, the entries of those that were converted, and those of others with parameters of their own."""
    converted: list[Entry] = []
    left: list[Entry] = []
    for name, schedule in schedules.items():
        if converted and converted[-1].name and name.startswith(f"{converted[-1].name}."):
            continue  # inside a module that a plugin took as a whole: what is inside follows it
        module = model.get_submodule(name)
        kind = module.kind.rpartition(".")[2] if isinstance(module, StatefulLayer) else type(module).__name__
        made, note = _convert_module(module, name, schedule)
        if made is not None:
            converted.append(Entry(name, kind, note))
            if isinstance(made, StatefulLayer):
                made.qualified_name = name
            if not name:
                return made, converted, left  # which is the whole model
            if made is not module:
                _replace(model, names[name], made)
        elif next(module.parameters(recurse=False), None) is not None:
            left.append(Entry(name, kind, without.get(name, note)))
    return model, converted, left


def _convert_module(module: nn.Module, name: str, schedule: Schedule) -> tuple[nn.Module | None, str]:
    """The module in low precision, or None; and its recipe, or the reason why it has none."""
    first = next((recipe for _, recipe in schedule.pieces if recipe is not None), None)
    if isinstance(module, StatefulLayer):
        module.recipe, module.schedule = schedule.at(0), schedule
        return (module, str(schedule)) if first is not None else (None, NO_RECIPE)
    if first is None:
        return None, NO_RECIPE
    was = type(module)
    made: nn.Module | None = registry.convert_module(module, name, first, own=OWN)
    if made is None:
        if type(module) is nn.Linear or holds_transposed(module):
            named = "an nn.Linear" if type(module) is nn.Linear else f"a {type(module).__name__}"
            return None, f"{named} whose forward was replaced on the object"
        if isinstance(module, nn.Linear):
            return None, "a subclass of nn.Linear, whose forward may be its own"
        if TAKEN in vars(module):
            return None, f"a plugin made it for {vars(module)[TAKEN]}, and none converts it again"
        own = ", ".join(key for key, _ in matrices(module)) if next(module.children(), None) is not None else ""
        return None, f"no plugin converts {type(module).__name__}{own and f', which holds {own} beside other modules'}"
    if not isinstance(made, nn.Module):
        raise LpqError(
            f"a plugin's lpq_convert_module returned {made!r} for {name or 'the model'} ({type(module).__name__}), and "
            "that is no torch.nn.Module: have it return the converted module, or None (`lpq plugins` lists the plugins)"
        )
    if isinstance(made, StatefulLayer):
        made.recipe, made.schedule = schedule.at(0), schedule
        return made, str(schedule)
    vars(made)[TAKEN] = first.title
    followers = {n: m for n, m in made.named_modules() if isinstance(m, Layer) and m.recipe == first and not m.schedule}
    for inner, layer in followers.items():
        layer.qualified_name = f"{name}.{inner}".strip(".")
        layer.recipe, layer.schedule = schedule.at(0), schedule
    note = str(schedule)
    if not followers and len(schedule.pieces) > 1:
        note = f"{first.title}, and nothing later: there is no lpq.nn.Linear of that recipe inside to follow the policy"
    if type(made) is not was:
        note += f"; it is a {type(made).__module__}.{type(made).__qualname__} now"
    return made, note


def _connect_layers(model: nn.Module, accumulate: Accumulate | None, *, compares: bool) -> None:
    """Give the layers of a model what they have in common: the step, the inputs, and whether ranks are compared."""
    layers = [module for module in model.modules() if isinstance(module, StatefulLayer)]
    staged = [layer for layer in layers if layer.schedule is not None and len(layer.schedule.pieces) > 1]
    stages = Stages(model, last_change(layer.schedule for layer in staged)) if staged else None
    models: dict[object, ConvertedModel] = {}
    inputs, check = SharedInputs(), ModelCheck.of(model) if compares else None
    for layer in layers:
        fsdp = layer.model.fsdp  # weights that an earlier call prepared stay so
        layer.join(models.setdefault(fsdp, ConvertedModel(inputs, accumulate, stages, check, fsdp)))


def _replace(model: nn.Module, aliases: list[str], made: nn.Module) -> None:
    for alias in aliases:
        parent, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)


def _close_shortcuts(model: nn.Module) -> None:
    """Make PyTorch's own Transformer layers call their linear layers: in evaluation they read the weights instead."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Layer) for m in module.modules()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def conversions(model: nn.Module) -> dict[str, Conversion]:
    """The record of the model, by its name; where several calls converted parts of it, the records of these parts."""
    check_model(model)
    found: dict[str, Conversion] = {}
    for own, module in model.named_modules():
        record, name = module.__dict__.get(RECORD), plain_name(own)
        if isinstance(record, Conversion) and not any(name.startswith(f"{part}." if part else "") for part in found):
            found[name] = record
    if not found:
        raise ValueError(
            "the model was not converted: call lpq.convert(model, …) first, or pass the whole that it is part of"
        )
    return found


def report(model: nn.Module, *, full: bool = False) -> Report:
    """Report the modules that ``convert`` converted, those that it left alone and why, and how weights travel now.

    The text begins with how much of the model is converted. Once a pass has called some layers, those that it did not
    call are named, and count as not converted. Those that it called and whose weight another module has read besides
    are named, and count as converted.

    Args:
        model: The converted model, or a part of it.
        full: Give each module a line of its own. Modules with equal lines share one otherwise.
    """
    parts = conversions(model)
    modules = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    idle = uncalled(model)
    read = read_past(model) - idle

    def named(part: str, entries: tuple[Entry, ...]) -> Iterator[Entry]:
        for entry in entries:
            yield replace(entry, name=plain_name(f"{part}.{entry.name}".strip(".")))

    def given(entry: Entry) -> Entry:
        past = UNCALLED if entry.name in idle else READ if entry.name in read else ""
        return replace(entry, note=entry.note + _given_since(modules.get(entry.name)) + past)

    def now(entry: Entry) -> Iterator[Entry]:
        """Find a converted module again: it may be gone since, or inside of another one, as with adapters."""
        module = modules.get(entry.name)
        found: list[str] = []
        for inner, part in module.named_modules() if module is not None else ():
            name = plain_name(f"{entry.name}.{inner}".strip("."))
            if _is_made(part) and not (found and f"{name}.".startswith(f"{found[-1]}.".lstrip("."))):
                found.append(name)
        yield from (given(replace(entry, name=name)) for name in found)
        if not found:
            kind = "nn.Linear" if type(module) is nn.Linear else type(module).__name__
            became = f"replaced by an ordinary {kind}" if module is not None else "taken out of the model"
            yield replace(entry, note=f"{entry.note}; since then {became}")

    prepared = [conversion.ranks for conversion in parts.values() if conversion.weights is not None]
    notes = weight_notes(model, prepared[0]) if prepared else ()
    converted = tuple(e for part, c in parts.items() for entry in named(part, c.report.converted) for e in now(entry))
    return Report(
        converted=converted,
        left=tuple(given(entry) for part, c in parts.items() for entry in named(part, c.report.left)),
        unmatched=tuple(pattern for c in parts.values() for pattern in c.report.unmatched),
        unreached=tuple(number for c in parts.values() for number in c.report.unreached),
        weights=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in notes),
        parallel=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in parallel_notes(model)),
        experts=tuple(Entry(plain_name(name), WEIGHT, note) for name, note in expert_notes(model)),
        uncalled=tuple(entry.name for entry in converted if entry.name in idle),
        read=tuple(entry.name for entry in converted if entry.name in read),
        coverage=coverage(model, {e.name for e in converted if _is_converted(modules.get(e.name))} - idle),
        full=full,
    )


def _is_made(module: nn.Module) -> bool:
    """Whether a conversion made it: lpq or a plugin."""
    return isinstance(module, StatefulLayer) or TAKEN in vars(module)


def _is_converted(module: nn.Module | None) -> bool:
    """Whether a conversion made this module, and it was not left alone by hand since."""
    return module is not None and _is_made(module) and not _given_since(module).endswith("left alone")


def _given_since(module: nn.Module | None) -> str:
    """The end of a note: the recipe that a layer was given by hand in place of its policy's; else empty."""
    if not isinstance(module, StatefulLayer) or module.schedule is None:
        return ""
    if any(module.recipe == recipe for _, recipe in module.schedule.pieces):
        return ""
    return f"; since then {module.recipe.title if module.recipe else 'left alone'}"
