"""An optimizer around another one, and the comparison of its options by ranks before its first step.

With other options on one rank, that rank has other collectives in a step. The ranks that share parameters meet in the
store of the job, since one of them may have wrapped its optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq.distributed.alike import compare_in_store
from lpq.distributed.ranks import sharing
from lpq.torch_private.optimizers import load_pre_hooks

DIFFER = "the ranks do not wrap their optimizers alike"
REMEDY = "Wrap the optimizer alike on all ranks, and take its steps on all"


class Wrapper(Optimizer):
    """An optimizer around another one, the ``optimizer``."""

    optimizer: Optimizer
    compared = False
    """Whether ranks have compared their options, as they do once."""

    @classmethod
    def check_wraps(cls, optimizer: object) -> None:
        """Raise unless this is an optimizer, and may get states here."""
        cls._check_mode()
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{cls.__name__} wraps an optimizer, such as torch.optim.AdamW(model.parameters()), and got a "
                f"{type(optimizer).__name__}: make one first"
            )
        closure, name = signature(type(optimizer).step).parameters.get("closure"), type(optimizer).__name__
        if closure is not None and closure.default is Parameter.empty:
            raise TypeError(
                f"{cls.__name__} cannot wrap {name}: it needs a closure in each step, to compute all gradients again. "
                "Use it alone, over weights that are not stored quantized, or wrap another, such as torch.optim.AdamW"
            )

    @classmethod
    def _check_mode(cls) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{cls.__name__} under torch.inference_mode(): no later step could write to the states that are made "
                "there. Make it, and take its steps, outside; torch.no_grad() does no harm"
            )

    def hooked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Have the hooks of this optimizer change a state before it is loaded; an error if it is no state then."""
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for before in load_pre_hooks(self).values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.check_state(state_dict)
        return state_dict

    def check_state(self, state_dict: object) -> None:
        """Raise unless this has all that the state of an optimizer has."""
        name = type(self).__name__
        remedy = "pass what state_dict() of such an optimizer gave"
        if not isinstance(state_dict, dict):
            raise TypeError(f"{name}.load_state_dict got a {type(state_dict).__name__}: {remedy}")
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise ValueError(f"{name}.load_state_dict got a state without {' and '.join(missing)}: {remedy}")
        if any("params" not in group for group in state_dict["param_groups"]):
            raise ValueError(f"{name}.load_state_dict got a group without params: {remedy}")

    def begin(self, closure: Callable[[], float] | None, options: Callable[[], Sequence[str]]) -> float | None:
        """Begin a step: call the closure. Before the first step, compare the ``options``."""
        self._check_mode()
        if not self.compared:
            self._compare(options())
            self.compared = True
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _compare(self, options: Sequence[str]) -> None:
        """Raise on all ranks that share parameters unless all wrap an optimizer of this kind with equal options."""
        name = type(self).__name__
        texts = [f"{name} of {type(self.optimizer).__name__}", *(f"{name} with {option}" for option in options)]
        waits = (
            "ranks that share parameters compare how they wrap an optimizer before its first step, as this rank does "
            f"with a {texts[0]}, and not all have come. {REMEDY}"
        )
        params = [p for group in self.param_groups for p in group["params"]]
        kinds = [p.device_mesh.device_type for p in params if isinstance(p, DTensor)]
        sets = sharing(params, device=torch.device(kinds[0] if kinds else "cpu"))  # on which groups of NCCL compare
        compare_in_store(((ranks, texts) for ranks in sets), "optimizers", (DIFFER, REMEDY, waits))
