"""Policy: the recipe of each layer at each step, by ordered rules; the first rule that matches wins. A rule covers the
layers whose dotted names match one of its patterns, and the steps before ``until``; after these steps the rules below
it take over. A layer that no rule covers is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeAlias

from lpq.recipes.blocks import block_of, spans, stacks_of
from lpq.recipes.errors import RecipeError, place
from lpq.recipes.gemms import Recipe
from lpq.recipes.globs import LONGEST, covers, literal, matches, matching, within
from lpq.registry.grammar import SKIP
from lpq.registry.showing import Readable, brief, preformatted
from lpq.registry.toml import text_of

PART = re.compile(r"[^.*?\[]+")
"""A part of a dotted name."""
HEAD = "lm_head"
"""The part of a name that stands for any layer that a model names as its output embeddings, too."""
LEAVE = (HEAD, "gate", "router")
"""The parts of names whose layers a policy made of one recipe leaves alone, as everybody in the field does: the head of
a language model, and the routers of a mixture of experts. A wrong bit in a router sends a token to another expert."""
LEAST = 16
"""Layers with fewer inputs or outputs are left alone, unless a rule names them: to encode them takes longer than it
saves."""
COMPARED = 5000
"""The most pairs of patterns that are compared in a search for rules that hide others: about a second."""
Steps: TypeAlias = int | Literal["later"] | None
"""The length of a run in steps; ``"later"``: it will be given later; None: it is not given."""


@dataclass(frozen=True)
class Rule:
    """One recipe for some layers and some steps."""

    match: tuple[str, ...]
    """Patterns for a layer's dotted name: ``*`` is any characters, ``?`` is one, ``[ab]`` is one of these."""
    recipe: Recipe | None
    """None: leave the layer alone."""
    until: float | int | None = None
    """The rule holds before this step; a float is a fraction of the run's steps; None: to the end."""
    blocks: str | None = None
    """The blocks that it is for, as ``"first 2"``, ``"last 15%"`` or ``"first 1, last 1"``, in each list of layers. A
    share is rounded up. None: the place of a layer does not matter."""

    def __post_init__(self) -> None:
        if not (isinstance(self.match, tuple) and self.match and all(isinstance(p, str) for p in self.match)):
            raise RecipeError(f"match must be a tuple of one or more patterns, not {brief(self.match)}")
        if longest := next((p for p in self.match if len(p) > LONGEST), None):
            raise RecipeError(f"the pattern {brief(longest)} has {len(longest)} characters, the most are {LONGEST}")
        if not isinstance(self.recipe, Recipe | None):
            raise RecipeError(f"recipe must be a Recipe or None, not {brief(self.recipe)}: lpq.policy takes names")
        whole = type(self.until) is int and self.until >= 1
        fraction = type(self.until) is float and 0 < self.until <= 1
        if not (whole or fraction or self.until is None):
            raise RecipeError(
                "until must be a step (a whole number from 1 on) or a fraction of the run "
                f"(a float above 0.0, up to 1.0), not {brief(self.until)}"
            )
        if self.blocks is not None:
            spans(str(self.blocks))

    def matches(self, name: str) -> bool:
        """Whether a pattern covers the layer with this name."""
        return any(matches(pattern, name) for pattern in self.match)

    def outlasts(self, other: Rule) -> bool:
        """Whether the rule holds in every block and at every step at which ``other`` holds."""
        if self.blocks not in (None, other.blocks):
            return False
        if self.until is None or other.until is None:
            return self.until is None
        return type(self.until) is type(other.until) and self.until >= other.until

    def end(self, steps: Steps) -> float | int | None:
        """The first step at which the rule no longer holds, in a run of ``steps``; a fraction until the length is
        given."""
        if not isinstance(self.until, float) or steps == "later":
            return self.until
        if steps is None:
            raise RecipeError(
                f"until = {self.until} is a fraction of the run, and the run's length is not known: "
                "say it, as in lpq.convert(model, policy, steps=10_000), or steps='later' and lpq.replan then, or give "
                "until as a step"
            )
        return math.ceil(Fraction(str(self.until)) * steps)  # as it was written: 0.55 of 100 is 55 and not 56

    def to_dict(self) -> dict[str, Any]:
        """Plain data that a rule of ``lpq.policy`` is made from."""
        until = {} if self.until is None else {"until": self.until}
        blocks = {} if self.blocks is None else {"blocks": self.blocks}
        return {"match": list(self.match), **blocks, **until, "recipe": self.recipe.text if self.recipe else SKIP}


@dataclass(frozen=True)
class Schedule(Readable):
    """The recipes of one layer, step by step."""

    pieces: tuple[tuple[float | int | None, Recipe | None], ...]
    """Recipes in order (None: left alone), each with the step before which it holds; the last has None. That step is a
    fraction of the run where its length is given later."""
    planned: tuple[Policy, str] | None = field(default=None, compare=False, repr=False)
    """The policy that it comes from, and the layer's name: to plan it for a run of another length."""

    def at(self, step: int) -> Recipe | None:
        """The recipe at this step, counted from 0; None: the layer is left alone."""
        until, recipe = next(p for p in self.pieces if p[0] is None or step < p[0] or isinstance(p[0], float))
        if isinstance(until, float) and step > 0:
            raise RecipeError(
                f"until = {until} is a fraction of the run, and steps='later' has not been followed by the run's "
                "length: call lpq.replan(model, steps=…) before step 1"
            )
        return recipe

    def replan(self, steps: int) -> Schedule:
        """The same schedule for a run of ``steps`` steps."""
        return self.planned[0].schedule(self.planned[1], steps) if self.planned is not None else self

    def __str__(self) -> str:
        titles = [recipe.title if recipe else "left alone" for _, recipe in self.pieces]
        forms = {float: " until {} of the run", int: " until step {}", type(None): ""}  # no other type is taken
        ends = [forms[type(until)].format(until) for until, _ in self.pieces]
        return ", then ".join(f"{title}{end}" for title, end in zip(titles, ends, strict=True))


def _hidden(rules: Sequence[Rule]) -> Iterator[tuple[int, str, int, str]]:
    """The patterns that an earlier rule is sure to hide: number and pattern of both. The search ends after
    ``COMPARED`` pairs of patterns that are alike; the report of a conversion names every rule that holds for no layer.
    """
    earlier: dict[str, list[tuple[str, int, Rule]]] = {}
    lengths: set[int] = set()
    budget = COMPARED
    for number, rule in enumerate(rules, 1):
        for pattern in rule.match:
            for piece in within(pattern, earlier, lengths):
                for cover, first, other in earlier[piece]:
                    if other.outlasts(rule):
                        budget -= 1
                        if covers(cover, pattern):
                            yield first, cover, number, pattern
                    if budget <= 0:
                        return
        for pattern in rule.match:
            earlier.setdefault(literal(pattern), []).append((pattern, number, rule))
            lengths.add(len(literal(pattern)))


@dataclass(frozen=True, repr=False)
class Policy:
    """Rules in their order, and the layers that are left alone regardless of the rules."""

    rules: tuple[Rule, ...]
    leave: tuple[str, ...] = ()
    """Parts of dotted names, between dots: a layer with one of them in its name is left alone."""
    least: int = LEAST
    """A layer with fewer inputs or outputs is left alone, unless a pattern matches only such layers."""
    stacks: tuple[tuple[str, int], ...] = ()
    """The lists of blocks of the model, and how many each has, for rules with ``blocks``; ``placed`` finds them."""

    def __post_init__(self) -> None:
        rules = self.rules
        if not (isinstance(rules, tuple) and rules and all(isinstance(rule, Rule) for rule in rules)):
            raise RecipeError(f"a policy's rules must be a tuple of one or more Rules, not {brief(rules)}")
        if not isinstance(self.leave, tuple) or not all(isinstance(p, str) and PART.fullmatch(p) for p in self.leave):
            raise RecipeError(
                f"leave must be a tuple of parts of names, without dots and wildcards, as ('lm_head',), and is "
                f"{brief(self.leave)}; a rule with recipe = {SKIP!r} takes patterns"
            )
        if type(self.least) is not int or self.least < 0:
            raise RecipeError(f"least must be a number of inputs or outputs, from 0 on, not {brief(self.least)}")
        for hider, cover, number, pattern in _hidden(self.rules):
            raise RecipeError(
                f"rule {hider} ({cover!r}) hides rule {number} ({pattern!r}), since the first match wins: "
                f"put rule {number} before rule {hider}, or drop the pattern"
            )

    def without_exceptions(self) -> Policy:
        """The same rules, for all layers that they match: ``include="all"``."""
        return replace(self, leave=(), least=0)

    def placed(self, names: Iterable[str]) -> Policy:
        """The policy for a model with these names of modules: rules with ``blocks`` need the number of its blocks."""
        if self.stacks or all(rule.blocks is None for rule in self.rules):
            return self
        return replace(self, stacks=stacks_of(names))

    def _in_block(self, rule: Rule, name: str) -> bool:
        """Whether the layer with this name is in a block that a rule is for."""
        block, counts = block_of(name), dict(self.stacks)
        if rule.blocks is None or block is None or block[0] not in counts:
            return rule.blocks is None
        return any(span.holds(block[1], counts[block[0]]) for span in spans(rule.blocks))

    def left_by(self, name: str) -> str | None:
        """The part of the name for which the layer is left alone regardless of the rules; None if there is none."""
        return next((part for part in name.split(".") if part in self.leave), None)

    def why_none(self, name: str) -> str:
        """Why the layer with this name has no recipe at any step: the rule that skips it, or that none is for it."""
        number = next((number for number, *_ in self._holding(name, "later")), None)
        if number is None:
            return "no rule of the policy is for it"
        rule = self.rules[number - 1]
        where = f"blocks {rule.blocks}" if rule.blocks else repr(next(p for p in rule.match if matches(p, name)))
        return f"rule {number} ({where}) gives it no recipe"

    @cached_property
    def _patterns(self) -> tuple[dict[str, list[int]], list[tuple[int, str, str]]]:
        """The numbers of the rules by their patterns that are names: a policy may have one for each layer of a model.
        And all other patterns: number, a part that stands for itself, and the pattern."""
        names, others = dict[str, list[int]](), []
        for number, rule in enumerate(self.rules, 1):
            for pattern in rule.match:
                if (part := literal(pattern)) == pattern:
                    names.setdefault(pattern, []).append(number)
                else:
                    others.append((number, part, pattern))
        return names, others

    def _matching(self, name: str) -> list[tuple[int, Rule]]:
        """The rules that match the layer with this name, whatever its block, with their numbers."""
        names, others = self._patterns
        numbers = {number for number, part, pattern in others if part in name and matches(pattern, name)}
        return [(number, self.rules[number - 1]) for number in sorted(numbers.union(names.get(name, ())))]

    def rules_for(self, name: str) -> tuple[Rule, ...]:
        """The rules that match the layer with this name."""
        return tuple(rule for _, rule in self._matching(name) if self._in_block(rule, name))

    def schedule(self, name: str, steps: Steps = None) -> Schedule:
        """The recipes of the layer with this name, by step. ``steps``: the run's length, for rules with fractions."""
        pieces: list[tuple[float | int | None, Recipe | None]] = []
        for _, until, recipe in self._holding(name, steps):
            if pieces and pieces[-1][1] == recipe:
                pieces.pop()  # goes on with the same recipe
            pieces.append((until, recipe))
        if not pieces or pieces[-1][0] is not None:
            pieces = [*(pieces[:-1] if pieces and pieces[-1][1] is None else pieces), (None, None)]
        return Schedule(tuple(pieces), (self, name))

    def _holding(self, name: str, steps: Steps) -> Iterator[tuple[int, float | int | None, Recipe | None]]:
        """The rules that hold for this layer at some step, in their order: number, end and recipe."""
        if self.left_by(name) is not None:
            return
        reached: dict[type, float] = {}  # a step and a fraction of a run of unknown length do not compare
        for number, rule in self._matching(name):
            if not (rule.blocks is None or self._in_block(rule, name)):
                continue
            with place(f"rule {number}"):
                until = rule.end(steps)
            if until is None or until > reached.get(type(until), 0):
                yield number, until, rule.recipe
            if until is None:
                return
            reached[type(until)] = max(reached.get(type(until), 0), until)

    def unreached(self, names: Iterable[str], steps: Steps = None) -> tuple[int, ...]:
        """The numbers of the rules that match some of these layers and hold for none of them at any step."""
        layers = tuple(name for name in names if self.left_by(name) is None)
        holding = {number for name in layers for number, _, _ in self._holding(name, steps)}
        others = [(number, rule) for number, rule in enumerate(self.rules, 1) if number not in holding]
        layers_by_pattern = matching((pattern for _, rule in others for pattern in rule.match), layers)
        return tuple(
            n for n, rule in others if any(self._in_block(rule, x) for p in rule.match for x in layers_by_pattern[p])
        )

    def misplaced(self, names: Iterable[str]) -> tuple[tuple[int, str], ...]:
        """The numbers of the rules with ``blocks`` that match some of these layers and are for none of them, each with
        the reason. None where the policy knows the blocks of the whole model: other stages of a pipeline may have them.
        """
        every = tuple(names)
        layers = [name for name in every if self.left_by(name) is None]
        numbered = [(number, rule) for number, rule in enumerate(self.rules, 1) if rule.blocks is not None]
        if self.stacks or not numbered:
            return ()
        placed = self.placed(every)
        why = "none of the layers that it matches is in its blocks"
        if not placed.stacks:
            why = (
                "this model has no list of layers for `blocks`: other rules hold for all of it; name layers by `match`"
            )
        by_rule = [(number, rule, [name for name in layers if rule.matches(name)]) for number, rule in numbered]
        return tuple((n, why) for n, rule, own in by_rule if own and not any(placed._in_block(rule, x) for x in own))

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """The patterns that match none of these layers."""
        patterns = (pattern for rule in self.rules for pattern in rule.match)
        return tuple(pattern for pattern, hits in matching(patterns, tuple(names)).items() if not hits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``lpq.policy`` makes this policy from."""
        leave = {"leave": list(self.leave)} if self.leave else {}
        least = {"least": self.least} if self.least != LEAST else {}
        stacks = {"stacks": [{"name": name, "blocks": count} for name, count in self.stacks]} if self.stacks else {}
        return {"rules": [rule.to_dict() for rule in self.rules], **leave, **least, **stacks}

    def to_toml(self) -> str:
        """The text of a TOML file that ``lpq.policy`` makes this policy from."""
        return text_of(self.to_dict())

    def __repr__(self) -> str:
        return f"lpq.policy({self.to_dict()!r})"

    def _repr_html_(self) -> str:
        return preformatted(self.to_toml())
