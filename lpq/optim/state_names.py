"""The states that an optimizer keeps of a parameter, found by having a copy of it take steps with small ones.

So any optimizer is known by what it does, and not by its name.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPES = ((2, 2), (2,))
PLAIN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of how a step is computed, as they are for the small parameters."""
VALUE = "the parameter"
"""The name of the parameter among its states."""
LARGER = 1e4
"""The factor by which an element of a state is made larger, to see what the next step makes of it."""
LATE = 10_000
"""The steps after which it is seen how a second moment falls: some optimizers have it fall fast at first."""


class StateKind(NamedTuple):
    """A state."""

    second: bool
    """Whether it is a second moment: positive, whatever the sign of the gradient, and where it is larger the update is
    no larger. A positive state that multiplies the update, as a step size, is none: to raise it would be harm."""
    fall: float
    """The factor by which it falls in a step without a gradient; of a second moment the factor of its root."""
    like: bool
    """Whether it has the shape of its parameter."""
    sums: bool
    """Whether it is a second moment that adds up all steps, and rises however large it is."""


def states_of(optimizer: Optimizer) -> dict[str, StateKind]:
    """The tensors that an optimizer keeps of a parameter, by name."""
    kinds: dict[str, StateKind] = {}
    error: Exception | None = None
    for group in {repr({**one, "params": ()}): one for one in optimizer.param_groups}.values():  # alike ones once
        for shape in SHAPES:
            try:
                states = _tried(optimizer, group, shape)
            except Exception as raised:  # not every optimizer takes matrices, or vectors
                error = raised
                continue
            for name, one in states.items():
                fall = max(one.fall, kinds[name].fall) if name in kinds else one.fall
                kinds[name] = one._replace(fall=fall)
    if not kinds and error is not None:
        raise TypeError(
            f"QuantizedStates cannot find the states of {type(optimizer).__name__}, whose step with a small matrix "
            f"raised {type(error).__name__}: {error}. It steps parameters one by one, by dense gradients and without a "
            "closure: use the optimizer alone, or one that steps so, such as torch.optim.AdamW"
        ) from error
    return kinds


def _tried(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, StateKind]:
    up, down, alone = (_stepped(optimizer, group, shape, *how) for how in ((1.0, False), (-1.0, False), (1.0, True)))
    pairs = [pair for name, values in up.items() for pair in zip(values, alone[name], strict=True)]
    if not all(bool(((x == y) | x.isnan()).all()) for x, y in pairs):
        raise TypeError(_together(optimizer, "takes other steps where parameters are stepped one by one"))
    values = up.pop(VALUE)
    kinds: dict[str, StateKind] = {}
    *_, update = _enlarged(optimizer, group, shape, "")
    for name, first in up.items():
        second = all(bool((x >= 0).all()) and bool((x > 0).any()) for x in (first[0], down[name][0]))
        rises = False
        if second:
            rises, moved = _enlarged(optimizer, group, shape, name)
            second = moved <= update
        ratio = (first[1] / first[0]).abs().nan_to_num(1.0).max()
        fall = float(ratio.sqrt() if second else ratio)
        kinds[name] = StateKind(second, fall, first[0].shape == values[0].shape, second and rises and fall >= 1)
    return kinds


def _enlarged(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], name: str) -> tuple[bool, float]:
    """Whether the first element of a state rises in a step with a gradient though it was made larger before, and how
    far the step moves the first element of a parameter of zeros. No name: no state is made larger."""
    found = _stepped(optimizer, group, shape, 1.0, True, last=1.0, larger=name)
    first = {key: [x.flatten()[0] for x in found[key]] for key in (name or VALUE, VALUE)}
    rises = bool(first[name or VALUE][1] > LARGER * first[name or VALUE][0])
    return rises, float(first[VALUE][1].abs())


@torch.random.fork_rng(devices=[])  # an optimizer may draw numbers
def _stepped(
    optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], sign: float, alone: bool,
    *, last: float = 0.0, larger: str = "",
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """The first of two small parameters, and its states, after two steps with a gradient and after one without, or with
    the ``last``, from zeros, which no weight decay moves. Each is stepped ``alone``, as ``QuantizedStates`` does it, or
    both together. ``larger``: a state whose first element is made larger before the last step."""
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float32)) for _ in range(2)]
    trial, kind = type(optimizer).__new__(type(optimizer)), type(optimizer)
    own = {
        name: copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if _is_constant(value) and not name.startswith("_optimizer_") and not callable(getattr(kind, name, None))
    }  # without hooks, and without a step that a scheduler put there
    groups = [{**one} for one in optimizer.param_groups]
    copies = {"defaults": {**optimizer.defaults}, "param_groups": groups, "state": {}}
    trial.__setstate__({**own, **optimizer.__getstate__(), **copies})  # torch writes to all three
    options = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    options |= {key: value for key, value in PLAIN.items() if key in group}
    trial.state, found = defaultdict(dict), []
    groups = [{**options, "params": [p]} for p in params] if alone else [{**options, "params": params}]
    for number, gradient in enumerate((sign, sign, last)):
        for factor, p in enumerate(params, 1):
            p.grad = torch.full_like(p, gradient * factor)
            if number == 2 and "step" in trial.state[p]:  # a tensor or a number
                trial.state[p]["step"] += LATE
            if number == 2 and last:
                p.detach().zero_()
            if number == 2 and larger:
                trial.state[p][larger][(0,) * trial.state[p][larger].dim()] *= LARGER
        for one in groups:
            trial.param_groups = [one]
            trial.step()
        state = {VALUE: params[0].detach(), **trial.state[params[0]]}
        found.append({name: x.clone() for name, x in state.items() if isinstance(x, Tensor) and x.dim()})
    for key in groups[0].keys() - {"params"}:
        if key not in options or groups[0][key] is not options[key]:
            raise TypeError(_together(optimizer, f"keeps {key!r} in its groups, and counts steps of the whole"))
    return {name: (value, found[2][name]) for name, value in found[1].items()}


def _is_constant(value: object) -> bool:
    """Whether a copy may have an attribute of the optimizer: no parameter, state or other optimizer is in it."""
    if isinstance(value, tuple | list | set | dict):
        return all(map(_is_constant, value.items() if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float | str | FunctionType | torch.dtype)


def _together(optimizer: Optimizer, does: str) -> str:
    return (
        f"{type(optimizer).__name__} {does}: QuantizedStates steps parameters one by one. Use it without, or without "
        "the option that does it"
    )
