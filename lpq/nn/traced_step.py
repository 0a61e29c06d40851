"""The step of a pass that something watches: a tracer, a dispatch mode or a compiler.

Dynamo would trace how a step is bound, in forward and again in backward, which takes it longer than all else of a
layer. So the step that it sees only names its functions: each call is one node of its graph, and the compiler behind it
runs the function, bound as for any other tracer, with the plan and the shapes as constants of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from lpq import recipes
from lpq.kernels.table import bound_once
from lpq.nn.encoded_inputs import why_no_gradient
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step, by_operators
from lpq.operations.compiled_calls import spare_the_dispatcher
from lpq.operations.encoder import Encoder
from lpq.torch_private.compiling import is_exporting, once_when_traced


def through_dispatcher(plan: Plan, shapes: Shapes) -> Step:
    """Bind by operators, for tracers and dispatch modes. Under all but a compiler every operand is encoded."""
    compiled = torch.compiler.is_dynamo_compiling()
    if compiled:
        spare_the_dispatcher()
    if not compiled or is_exporting() or shapes.parts is not None or shapes.arrived:
        return by_operators(plan, shapes, compiled=compiled)
    sizes, facts = shapes[:3], shapes[3:]
    there = _functions(plan.text, facts)

    def function(name: str) -> Callable[..., Any]:
        return partial(_call, plan.text, sizes, facts, name)

    def encoder(name: str) -> Encoder:
        later = f"{name}.later"
        return Encoder(None, None, function(f"{name}.encode"), function(later) if f" {later} " in there else None)

    return Step(
        encoder("x") if " x.encode " in there else None,
        encoder("w") if " w.encode " in there else None,
        encoder("dy"),
        function("fprop"),
        function("dgrad") if " dgrad " in there else None,
        function("wgrad") if " wgrad " in there else None,
        why_no_gradient(plan),
    )


@once_when_traced
def _functions(text: str, facts: tuple[Any, ...]) -> str:
    """The names of the functions that a step has, each between spaces: a text, which Dynamo takes for a constant."""
    torch.compiler.allow_in_graph(_call)  # type: ignore[no-untyped-call]
    step, found = _step(text, (0, 0, 0), facts), [""]
    for name in ("x", "w", "dy"):
        encoder = getattr(step, name)
        found += [f"{name}.{part}" for part in ("encode", "later") if getattr(encoder, part, None) is not None]
    return " ".join([*found, *(name for name in ("fprop", "dgrad", "wgrad") if getattr(step, name) is not None), ""])


def _call(text: str, sizes: tuple[int, int, int], facts: tuple[Any, ...], name: str, *args: Any) -> Any:
    """Call a function of a step with tensors. Sizes may be symbols, which no cache takes."""
    bind = _step_few if all(type(size) is int for size in sizes) else _step
    return attrgetter(name)(bind(text, sizes, facts))(*args)


def _step(text: str, sizes: tuple[int, int, int], facts: tuple[Any, ...]) -> Step:
    return by_operators(_plan(text), Shapes(*sizes, *facts), compiled=True)


_step_few = bound_once(_step)


@bound_once
def _plan(text: str) -> Plan:
    return Plan.of(recipes.recipe(text))
