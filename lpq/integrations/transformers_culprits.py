"""A callback for transformers' Trainer that finds the layer which takes a run off its course, and may promote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpq.observe import Before, Course, Culprits
from lpq.observe.culprits import check_search
from lpq.observe.readings import check_whole
from lpq.observe.replay import gradient_norm
from lpq.observe.trigger import Trigger
from lpq.registry.warning import warn

NAME = "CulpritsCallback"
if TYPE_CHECKING:
    CulpritsCallback: type[Any]


class _Culprits:
    """Compares the loss and the norm of the gradients, as they are after clipping, with the steps before. A step that
    leaves this course is replayed, with a warning of the culprits; ``found`` has them by step. Later steps are not
    replayed before one was on the course again. The host waits for the loss in each step."""

    def __init__(
        self, *, course: Course | None = None, promote: int = 0, most: int = 3, least: float = 0.1, replays: int = 64
    ) -> None:
        """``promote``: for how many steps the culprits are in bf16 then, by rules of the policy that ``LpqCallback``
        follows and keeps; 0: they stay. The others are as in ``lpq.observe.culprits``."""
        check_whole(NAME, 0, promote=promote)
        check_search(NAME, course, most=most, least=least, replays=replays)
        self._trigger = Trigger(course, promote, most=most, least=least, replays=replays)
        self.found: dict[int, Culprits] = self._trigger.found
        self._batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._losses: list[Tensor] = []
        self._before: Before | None = None
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Note the batches and the losses from now on."""
        self._hooks = [
            model.register_forward_pre_hook(self._note, with_kwargs=True), model.register_forward_hook(self._take)
        ]  # fmt: skip

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Note what the step depends on."""
        self._batches, self._losses, self._before = [], [], Before(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Replay the step if it leaves the course."""
        if not self._losses:
            return
        batches, self._batches, before, self._before = self._batches, [], self._before, None  # no hook notes replays

        by_items = any(by_name.get("num_items_in_batch") is not None for _, by_name in batches)
        parts = 1 if by_items else len(batches)  # a loss by items is a share of the step's already

        def closure() -> Tensor:
            losses = []
            for inputs, by_name in batches:
                loss = _loss(model(*inputs, **by_name)) / parts
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            return torch.stack(losses).sum()

        loss, norm = torch.stack(self._losses).sum() / parts, gradient_norm(model)
        if words := self._trigger.look(model, state.global_step, _mean(loss), _mean(norm), closure, before):
            warn(words)

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before is not None and model.training:
            self._batches.append((args, dict(kwargs)))

    def _take(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._before is not None and model.training:
            self._losses.append(_loss(output).detach())


def _loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
    return loss


def _mean(value: Tensor) -> float:
    """The mean over all ranks, so that they decide alike."""
    value = value.detach().clone().float()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import TrainerCallback

    cls = type(NAME, (_Culprits, TrainerCallback), {"__module__": __name__, "__doc__": _Culprits.__doc__})
    globals()[name] = cls
    return cls
