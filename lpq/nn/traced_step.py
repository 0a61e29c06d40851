"""The step of a pass that something watches: a tracer, a dispatch mode or a compiler.

Dynamo would trace how a step is bound, in forward and again in backward, which takes it longer than all else of a
layer. So the step that it sees only names its functions: each call is one node of its graph, and the compiler behind it
runs the function, bound as for any other tracer, with the plan and the shapes as constants of the graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lpq import recipes, registry
from lpq.kernels.table import bound_once
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step, by_operators
from lpq.operations.compiled_calls import spare_the_dispatcher
from lpq.operations.encoder import Encoder
from lpq.recipes.gemms import TENSORS
from lpq.torch_private.compiling import once_when_traced

OF_ENCODER = "encode", "later", "begin", "arrive"
OF_STEP = "fprop", "dgrad", "wgrad", "exchange", "settle", "finish_dx", "remember"


def through_dispatcher(plan: Plan, shapes: Shapes) -> Step:
    """Bind by operators, for tracers and dispatch modes. Under all but a compiler every operand is encoded."""
    if not torch.compiler.is_dynamo_compiling():
        return by_operators(plan, shapes, compiled=False)
    spare_the_dispatcher()
    text, parts = plan.text, shapes.parts
    # ``parts``, the last of the shapes, may hold a process group: its class and values stand for it.
    facts = shapes[:-1], None if parts is None else parts.named(sized=True)
    of_any_size = (0, 0, 0, *facts[0][3:]), None if parts is None else parts.named(sized=False)
    own, x, w, dy, refuses = _functions(text, *of_any_size).split(";", 4)
    steps: dict[str, Any] = {"dgrad": None, "wgrad": None, "refuses": refuses or None}
    for name in own.split():
        steps[name] = partial(_call, text, facts, name, None)
    for tensor, there in zip(TENSORS, (x, w, dy), strict=True):
        how: dict[str, Any] = {name: partial(_call, text, facts, tensor, name) for name in there.split()}
        steps[tensor] = Encoder(None, None, **how) if how else None
    return Step(**steps)


Values = tuple[Any, ...]


@once_when_traced
def _functions(text: str, facts: Values, parts: Values | None) -> str:
    """The names of the functions that a step has, and its encoders, and why it refuses a gradient, in one text, which
    Dynamo takes for a constant."""
    torch.compiler.allow_in_graph(_call)  # type: ignore[no-untyped-call]
    step = _step_few(text, facts, parts)
    owners = (step, OF_STEP), *((getattr(step, tensor), OF_ENCODER) for tensor in TENSORS)
    there = [" ".join(name for name in names if getattr(owner, name, None) is not None) for owner, names in owners]
    return ";".join([*there, step.refuses or ""])


def _call(text: str, facts: tuple[Values, Values | None], part: str, name: str | None, *args: Any) -> Any:
    """Call a function of a step, or of an encoder of it, with tensors. Sizes may be symbols, which no cache takes."""
    try:
        hash(facts)
    except TypeError:
        step = _step(text, *facts)
    else:
        step = _step_few(text, *facts)
    function = getattr(step, part)
    return (function if name is None else getattr(function, name))(*args)


def _step(text: str, facts: Values, parts: Values | None) -> Step:
    """The step of plain values, which are all that Dynamo of torch 2.11 takes for constants."""
    divided = None if parts is None else registry.resolve(parts[0])(*parts[1:])
    return by_operators(_plan(text), Shapes(*facts)._replace(parts=divided), compiled=True)


_step_few = bound_once(_step)


@bound_once
def _plan(text: str) -> Plan:
    return Plan.of(recipes.recipe(text))
