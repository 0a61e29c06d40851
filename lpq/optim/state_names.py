"""The states that an optimizer keeps of a parameter, found by having a copy of it take steps with a small one.

So any optimizer is known by what it does, and not by its name.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPES = ((2, 2), (2,))
PLAIN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of how a step is computed, as they are for the small parameter."""
LATE = 10_000
"""The number of the step in which it is seen how a second moment falls: some optimizers have it fall fast at first."""


class StateKind(NamedTuple):
    """A state."""

    second: bool
    """Whether it is a second moment: positive, whatever the sign of the gradient."""
    fall: float
    """The factor by which it falls in a step without a gradient; of a second moment the factor of its root."""
    like: bool
    """Whether it has the shape of its parameter."""


def states_of(optimizer: Optimizer) -> dict[str, StateKind]:
    """The tensors that an optimizer keeps of a parameter, by name."""
    kinds: dict[str, StateKind] = {}
    error: Exception | None = None
    for group in optimizer.param_groups:
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
            f"raised {type(error).__name__}: {error}"
        ) from error
    return kinds


def _tried(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, StateKind]:
    (param, up), (_, down) = (_stepped(optimizer, group, shape, sign) for sign in (1.0, -1.0))
    kinds: dict[str, StateKind] = {}
    for name, first in up.items():
        second = all(bool((x >= 0).all()) and bool((x > 0).any()) for x in (first[0], down[name][0]))
        ratio = (first[1] / first[0]).abs().nan_to_num(1.0).max()
        kinds[name] = StateKind(second, float(ratio.sqrt() if second else ratio), first[0].shape == param.shape)
    return kinds


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], sign: float
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The small parameter and its states, after a step with a gradient, and after one without."""
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float32))
    trial = type(optimizer).__new__(type(optimizer))
    trial.__setstate__({**optimizer.__getstate__(), "defaults": {**optimizer.defaults}})  # torch adds defaults
    options = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    options |= {key: value for key, value in PLAIN.items() if key in group} | {"params": [param]}
    trial.state, trial.param_groups = defaultdict(dict), [dict(options)]
    param.grad = torch.full_like(param, sign)
    trial.step()
    state = trial.state[param]
    tensors = [name for name, value in state.items() if isinstance(value, Tensor) and value.dim()]
    first = {name: state[name].clone() for name in tensors}
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(LATE)
    param.grad = torch.zeros_like(param)
    trial.step()
    changed = [key for key, value in trial.param_groups[0].items() if key not in options or value is not options[key]]
    if changed:
        raise TypeError(
            f"{type(optimizer).__name__} keeps {changed[0]!r} in its groups, and counts steps of the whole: "
            "QuantizedStates steps parameters one by one. Use it without"
        )
    return param, {name: (first[name], state[name]) for name in tensors}
