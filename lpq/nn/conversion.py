"""Converting a model: give each linear layer the recipe that a policy gives it, in place, and say what happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lpq import recipes, registry
from lpq.nn.linear import Linear

if TYPE_CHECKING:
    from lpq.recipes import Policy, PolicyLike, Recipe

RECORD = "lpq_conversion"


@dataclass(frozen=True)
class Entry:
    """One module in the report."""

    name: str
    kind: str
    """The class of the module before the conversion."""
    note: str
    """The recipe it got, or why it was left alone."""


@dataclass(frozen=True)
class Report:
    """What a conversion swapped, and what it left alone and why."""

    converted: tuple[Entry, ...]
    left: tuple[Entry, ...]
    unmatched: tuple[str, ...]
    """Patterns of the policy that match no layer."""

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} converted, {len(self.left)} left alone"]
        for title, entries in (("converted", self.converted), ("left alone", self.left)):
            lines += [f"{title:>10}  {e.name or '(the model)'} ({e.kind}): {e.note}" for e in entries]
        lines += [f"no layer matches the pattern {p!r}" for p in self.unmatched]
        return "\n".join(lines)


@dataclass(frozen=True)
class Conversion:
    """What a model carries: its policy, the length of the run and the report."""

    policy: Policy
    steps: int | None
    report: Report


class _LinearConverter:
    """lpq's own answer to the hook, asked after every plugin's."""

    @registry.hookimpl(trylast=True)
    def lpq_convert_module(self, module: Any, fqn: str, recipe: Recipe) -> Any:
        return Linear.adopt(module, recipe) if type(module) is nn.Linear else None


def convert(model: nn.Module, policy: PolicyLike, *, steps: int | None = None) -> nn.Module:
    """Convert the linear layers of ``model`` in place and return it.

    ``policy`` is a policy or anything that makes a recipe: a name, the grammar, a mapping, a TOML file. ``steps`` is
    the length of the run, for rules that end at a fraction of it; see ``set_step``. A model may be converted again.
    """
    policy = recipes.policy(policy)
    converted: list[Entry] = []
    left: list[Entry] = []
    seen: list[str] = []
    done: set[int] = set()
    for name, module in list(model.named_modules()):
        if any(name.startswith(f"{e.name}.") for e in converted if e.name):
            continue  # inside a module that a plugin took as a whole
        if isinstance(module, Linear) or next(module.parameters(recurse=False), None) is not None:
            seen.append(name)
            kind = "Linear" if isinstance(module, Linear) else type(module).__name__
            entry = _convert_one(model, name, module, kind, policy, steps)
            (converted if entry[0] else left).append(entry[1])
            done.add(id(module))
    report = Report(tuple(converted), tuple(left), tuple(policy.unmatched(seen)))
    model.__dict__[RECORD] = Conversion(policy, steps, report)
    return model


def _convert_one(
    model: nn.Module, name: str, module: nn.Module, kind: str, policy: Policy, steps: int | None
) -> tuple[bool, Entry]:
    schedule = policy.schedule(name, steps)
    recipe = schedule.at(0)
    if isinstance(module, Linear):
        module.recipe, module.schedule = recipe, schedule
        return recipe is not None, Entry(name, kind, str(recipe) if recipe else "the policy gives it no recipe")
    first = next((r for _, r in schedule.pieces if r is not None), None)
    if first is None:
        return False, Entry(name, kind, "the policy gives it no recipe")
    made = registry.convert_module(module, name, first, own=_LinearConverter())
    if made is None:
        if isinstance(module, nn.Linear):
            return False, Entry(name, kind, "a subclass of nn.Linear, whose forward may be its own")
        return False, Entry(name, kind, f"no plugin converts {kind}")
    if isinstance(made, Linear):
        made.recipe, made.schedule = recipe, schedule
    if made is not module:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)
    return True, Entry(name, kind, str(schedule))


def _conversion(model: nn.Module) -> Conversion:
    for module in model.modules():
        record = module.__dict__.get(RECORD)
        if isinstance(record, Conversion):
            return record
    raise ValueError("the model was not converted: call lpq.convert(model, …) first")


def report(model: nn.Module) -> Report:
    """What ``convert`` swapped in this model, what it left alone and why."""
    return _conversion(model).report


def set_step(model: nn.Module, step: int) -> None:
    """Give every layer the recipe that the policy has for this step. Weights and optimizer state stay."""
    for module in model.modules():
        if isinstance(module, Linear) and module.schedule is not None:
            module.recipe = module.schedule.at(step)


@contextmanager
def hold_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Encode every weight once, for all micro-batches inside the ``with``; take the optimizer's step outside."""
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    try:
        for layer in layers:
            layer.hold_weight()
        yield model
    finally:
        for layer in layers:
            layer.release_weight()
